package client

import (
	"context"

	"dozable.com/doz/internal/api"
)

// A sandbox's life, one request each.

func (c *Client) Wake(ctx context.Context, name string) (api.StartResult, error) {
	return call[api.StartResult](ctx, c, api.OpWake, api.NameRequest{Name: name})
}

func (c *Client) Pause(ctx context.Context, name string) (api.Transition, error) {
	return call[api.Transition](ctx, c, api.OpPause, api.NameRequest{Name: name})
}

func (c *Client) Resume(ctx context.Context, name string) (api.Transition, error) {
	return call[api.Transition](ctx, c, api.OpResume, api.NameRequest{Name: name})
}

func (c *Client) Sleep(ctx context.Context, name string) (api.Transition, error) {
	return call[api.Transition](ctx, c, api.OpSleep, api.NameRequest{Name: name})
}

func (c *Client) Hibernate(ctx context.Context, name string) (api.Transition, error) {
	return call[api.Transition](ctx, c, api.OpHibernate, api.NameRequest{Name: name})
}

func (c *Client) Reset(ctx context.Context, name string) (api.Transition, error) {
	return call[api.Transition](ctx, c, api.OpReset, api.NameRequest{Name: name})
}

func (c *Client) Fork(ctx context.Context, r api.ForkRequest) (api.ForkResult, error) {
	return call[api.ForkResult](ctx, c, api.OpFork, r)
}

func (c *Client) Duplicate(ctx context.Context, r api.DuplicateRequest) (api.DuplicateResult, error) {
	return call[api.DuplicateResult](ctx, c, api.OpDuplicate, r)
}

func (c *Client) TakePoint(ctx context.Context, r api.PointTakeRequest) (api.PointResult, error) {
	return call[api.PointResult](ctx, c, api.OpPointTake, r)
}

func (c *Client) Points(ctx context.Context, name string) ([]api.Point, error) {
	return call[[]api.Point](ctx, c, api.OpPointList, api.NameRequest{Name: name})
}

func (c *Client) FindPoint(ctx context.Context, r api.PointRequest) (api.Point, error) {
	return call[api.Point](ctx, c, api.OpPointFind, r)
}

func (c *Client) Revert(ctx context.Context, r api.PointRequest) (api.PointResult, error) {
	return call[api.PointResult](ctx, c, api.OpPointRevert, r)
}

func (c *Client) ForkPoint(ctx context.Context, r api.PointForkRequest) (api.Sandbox, error) {
	return call[api.Sandbox](ctx, c, api.OpPointFork, r)
}

func (c *Client) RemovePoint(ctx context.Context, r api.PointRequest) (api.Point, error) {
	return call[api.Point](ctx, c, api.OpPointRemove, r)
}

func (c *Client) MakeTemplate(ctx context.Context, r api.TemplateRequest) (api.Image, error) {
	return call[api.Image](ctx, c, api.OpTemplate, r)
}
