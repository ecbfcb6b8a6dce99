package api

// ValidName says whether name can be a sandbox's or an image's: 1 to 40 of a-z, 0-9
// and -.
func ValidName(name string) bool {
	if len(name) < 1 || len(name) > 40 {
		return false
	}
	for _, c := range []byte(name) {
		if (c < 'a' || c > 'z') && (c < '0' || c > '9') && c != '-' {
			return false
		}
	}
	return true
}
