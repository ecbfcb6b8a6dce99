package api

import "errors"

// AsError gives any error the protocol's form; one that has it already keeps it.
func AsError(err error) *Error {
	var e *Error
	if errors.As(err, &e) {
		return e
	}
	return &Error{Kind: KindFailed, Message: err.Error()}
}
