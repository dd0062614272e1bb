// Command runsc is gVisor's OCI runtime with only the commands that SPACE uses.
//
// It leaves out gVisor's embedded helper for checkpoints in cloud object
// storage, which is more than half of the upstream binary, and every command
// that a sandbox's life does not need. scripts/build-runsc.sh builds it and sets
// the version string, which restore compares with the one in a checkpoint.
package main

import (
	"github.com/google/subcommands"
	"gvisor.dev/gvisor/runsc/cli"
	"gvisor.dev/gvisor/runsc/cmd"
	"gvisor.dev/gvisor/runsc/cmd/sentry/sentrycmd"
	"gvisor.dev/gvisor/runsc/cmd/util"
	"gvisor.dev/gvisor/runsc/version"
)

// The linker sets the version only in a program that refers to it.
var _ = version.Version()

const internal = "internal use only"

func main() {
	cli.Run(nil, map[util.SubCommand]string{
		new(cmd.Checkpoint): "",
		new(cmd.Create):     "",
		new(cmd.Delete):     "",
		new(cmd.Events):     "",
		new(cmd.Exec):       "",
		new(cmd.Kill):       "",
		new(cmd.List):       "",
		new(cmd.PS):         "",
		new(cmd.Pause):      "",
		new(cmd.Restore):    "",
		new(cmd.Resume):     "",
		new(cmd.Run):        "",
		new(cmd.Start):      "",
		new(cmd.State):      "",
		new(cmd.Update):     "",
		new(cmd.Wait):       "",
		// What runsc starts by executing itself again.
		new(sentrycmd.Boot):   internal,
		new(cmd.Gofer):        internal,
		new(sentrycmd.Umount): internal,
	}, []subcommands.Command{})
}
