package guest

import (
	"bytes"
	"fmt"
	"io"
	"os"
	"slices"
	"strings"

	"golang.org/x/sys/unix"
)

// maxHosts is the largest hosts file that is looked at.
const maxHosts = 64 << 10

// nameHost makes the machine's own name resolve, as sudo and many servers want,
// by one line in the hosts file at path. A file that names it is left alone, and
// so is whatever is not a plain file: it is the sandbox's own.
func nameHost(path, name string) error {
	if name == "" || strings.ContainsAny(name, " \t\r\n#") {
		return nil
	}
	f, err := os.OpenFile(path, os.O_RDWR|os.O_CREATE|os.O_APPEND|unix.O_NOFOLLOW|unix.O_NONBLOCK, 0o644)
	if err != nil {
		return err
	}
	defer func() { _ = f.Close() }()
	if st, err := f.Stat(); err != nil || !st.Mode().IsRegular() || st.Size() > maxHosts {
		return err
	}
	b, err := io.ReadAll(io.LimitReader(f, maxHosts))
	if err != nil {
		return err
	}
	for line := range bytes.Lines(b) {
		text, _, _ := strings.Cut(string(line), "#")
		if slices.Contains(strings.Fields(text), name) {
			return nil
		}
	}
	add := fmt.Sprintf("127.0.1.1\t%s\n", name)
	if len(b) == 0 {
		add = "127.0.0.1\tlocalhost\n::1\tlocalhost\n" + add
	} else if b[len(b)-1] != '\n' {
		add = "\n" + add
	}
	_, err = f.WriteString(add)
	return err
}
