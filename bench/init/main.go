// Command init is the yardstick of a cold start: a machine's first program that says
// it is there, and nothing else. It must not do more.
package main

import "os"

func main() {
	os.Stdout.WriteString("ready\n") // the kernel gives its init the console
	select {}
}
