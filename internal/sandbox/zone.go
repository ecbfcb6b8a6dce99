package sandbox

import (
	"os"
	"path/filepath"
	"strings"
)

// localZone is this computer's time zone by its name, or "" when it has none.
func localZone() string {
	if zone := os.Getenv("TZ"); zone != "" && !strings.HasPrefix(zone, ":") && !filepath.IsAbs(zone) {
		return zone
	}
	target, err := filepath.EvalSymlinks("/etc/localtime")
	if err != nil {
		return ""
	}
	_, zone, found := strings.Cut(target, "/zoneinfo/")
	if !found {
		return ""
	}
	return zone
}
