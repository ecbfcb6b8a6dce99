// Command doz is the command line and, started again by it, the host.
package main

import (
	"os"

	"dozable.com/doz/internal/cli"
	"dozable.com/doz/internal/store"
)

// version is set by the linker.
var version = "dev"

func main() {
	deps := cli.Deps{Version: version, DefaultStore: store.Default, Open: open}
	os.Exit(cli.Main(deps, os.Args[1:], os.Stdin, os.Stdout, os.Stderr))
}
