// Command probe is PID 1 of machines in the driver's own tests: it does what a
// test asks for over the channel, without any of the guest daemon's rules.
package main

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"os"
	"os/exec"
	"os/signal"
	"runtime"
	"strconv"
	"strings"
	"syscall"
	"time"

	"github.com/space-platform/space/internal/channel"
)

const socket = "/.space/channel/host.sock"

func main() {
	if len(os.Args) > 1 {
		switch os.Args[1] {
		case "sleep":
			time.Sleep(time.Hour)
		case "id":
			fmt.Println(os.Getuid(), os.Geteuid())
		}
		return
	}
	signal.Ignore(syscall.SIGPIPE)
	mux := http.NewServeMux()
	for name, f := range map[string]func(q func(string) string, body io.Reader) (any, error){
		"facts": facts, "write": write, "read": read, "list": list, "alloc": alloc, "fork": fork,
		"suid": suid, "loopback": loopback, "exit": exit, "exit-soon": exitSoon, "fill": fill, "link": link, "rename": rename, "connect": connect,
	} {
		mux.HandleFunc("POST /"+name, func(w http.ResponseWriter, r *http.Request) {
			out, err := f(r.URL.Query().Get, r.Body)
			if err != nil {
				http.Error(w, err.Error(), http.StatusInternalServerError)
				return
			}
			_ = json.NewEncoder(w).Encode(out)
		})
	}
	_ = channel.Serve(context.Background(), func(ctx context.Context) (net.Conn, error) {
		var d net.Dialer
		return d.DialContext(ctx, "unix", socket)
	}, mux, channel.ServeOptions{})
}

func facts(func(string) string, io.Reader) (any, error) {
	host, _ := os.Hostname()
	status, _ := os.ReadFile("/proc/self/status")
	mounts, _ := os.ReadFile("/proc/mounts")
	var links []string
	interfaces, _ := net.Interfaces()
	for _, i := range interfaces {
		links = append(links, i.Name)
	}
	wd, _ := os.Getwd()
	return map[string]any{
		"hostname": host, "env": os.Environ(), "args": os.Args, "cpus": runtime.NumCPU(), "pid": os.Getpid(),
		"status": string(status), "mounts": string(mounts), "links": links, "dir": wd,
	}, nil
}

func write(q func(string) string, body io.Reader) (any, error) {
	b, err := io.ReadAll(body)
	if err != nil {
		return nil, err
	}
	return len(b), os.WriteFile(q("path"), b, 0o644)
}

func read(q func(string) string, _ io.Reader) (any, error) {
	b, err := os.ReadFile(q("path"))
	return string(b), err
}

func list(q func(string) string, _ io.Reader) (any, error) {
	entries, err := os.ReadDir(q("path"))
	var names []string
	for _, e := range entries {
		names = append(names, e.Name())
	}
	return names, err
}

func link(q func(string) string, _ io.Reader) (any, error) {
	_ = os.RemoveAll(q("path"))
	return nil, os.Symlink(q("to"), q("path"))
}

func rename(q func(string) string, _ io.Reader) (any, error) {
	return nil, os.Rename(q("path"), q("to"))
}

// connect opens n connections to the host and leaves them open.
func connect(q func(string) string, _ io.Reader) (any, error) {
	n, _ := strconv.Atoi(q("n"))
	for i := range n {
		c, err := net.DialTimeout("unix", socket, time.Second)
		if err != nil {
			return i, nil
		}
		held = append(held, c)
	}
	return n, nil
}

var held []any

func alloc(q func(string) string, _ io.Reader) (any, error) {
	mib, _ := strconv.Atoi(q("mib"))
	b, err := syscall.Mmap(-1, 0, mib<<20, syscall.PROT_READ|syscall.PROT_WRITE, syscall.MAP_ANON|syscall.MAP_PRIVATE)
	if err != nil {
		return nil, err
	}
	for i := 0; i < len(b); i += 4096 {
		b[i] = byte(i >> 12)
	}
	return mib, nil
}

// fork starts up to n children that stay, and tells how many it got.
func fork(q func(string) string, _ io.Reader) (any, error) {
	n, _ := strconv.Atoi(q("n"))
	uid, _ := strconv.Atoi(q("uid"))
	for i := range n {
		cmd := exec.Command("/bin/probe", "sleep")
		cmd.SysProcAttr = &syscall.SysProcAttr{Credential: &syscall.Credential{Uid: uint32(uid)}}
		if err := cmd.Start(); err != nil {
			return map[string]any{"started": i, "error": err.Error(), "again": errors.Is(err, syscall.EAGAIN)}, nil
		}
	}
	return map[string]any{"started": n}, nil
}

// suid runs a set-uid root program as another user.
func suid(func(string) string, io.Reader) (any, error) {
	cmd := exec.Command("/bin/suid", "id")
	cmd.SysProcAttr = &syscall.SysProcAttr{Credential: &syscall.Credential{Uid: 1000, Gid: 1000}}
	b, err := cmd.Output()
	return strings.TrimSpace(string(b)), err
}

func loopback(func(string) string, io.Reader) (any, error) {
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		return nil, err
	}
	defer l.Close()
	c, err := net.Dial("tcp", l.Addr().String())
	if err != nil {
		return nil, err
	}
	c.Close()
	_, err = net.DialTimeout("tcp", "192.0.2.1:80", time.Second)
	return fmt.Sprint(err), nil
}

func exit(q func(string) string, _ io.Reader) (any, error) {
	code, _ := strconv.Atoi(q("code"))
	os.Exit(code)
	return nil, nil
}

// exitSoon powers off after the host has had time to look away.
func exitSoon(func(string) string, io.Reader) (any, error) {
	time.AfterFunc(1500*time.Millisecond, func() { os.Exit(0) })
	return nil, nil
}

// fill writes to path until the disk refuses.
func fill(q func(string) string, _ io.Reader) (any, error) {
	f, err := os.Create(q("path"))
	if err != nil {
		return nil, err
	}
	defer f.Close()
	block := make([]byte, 1<<20)
	for n := 0; ; n++ {
		if _, err := f.Write(block); err != nil {
			return map[string]any{"mib": n, "full": errors.Is(err, syscall.ENOSPC), "error": err.Error()}, nil
		}
		if n > 1<<14 {
			return nil, errors.New("no end of the disk")
		}
	}
}
