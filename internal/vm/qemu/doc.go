// Package qemu is the engine that runs machines in QEMU, one process each, on
// Linux.
//
// A machine's process has the machine's folder (vm.Config.Dir) as its working
// directory and answers on three sockets there; it outlives the process that
// started it, and is found again by that folder, never by a recorded number. What
// the engine needs of this computer it finds out by trying (Probe). The package
// must not know of sandboxes, stores or policy.
package qemu
