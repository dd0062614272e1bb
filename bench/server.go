package main

import (
	"context"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"syscall"
	"time"

	"github.com/space-platform/space/api/spaceapi"
	"github.com/space-platform/space/client"
	"github.com/space-platform/space/internal/layout"
)

// wait bounds one life-cycle change.
const wait = 60 * time.Second

// server is a `space up` of the benchmark's own.
type server struct {
	layout layout.Layout
	cmd    *exec.Cmd
	done   chan error
	log    string
	*client.Client
	binary string
}

// serve starts a server with directories named by name. It waits for the first
// build of the templates.
func (b *bench) serve(ctx context.Context, name, binary string) (*server, error) {
	s := &server{
		layout: layout.Layout{Data: filepath.Join(b.data, name), Run: filepath.Join(b.run, name)},
		log:    filepath.Join(b.data, name+".log"), binary: binary,
	}
	return s, s.start(ctx, b.templates)
}

func (s *server) start(ctx context.Context, templates string) error {
	log, err := os.Create(s.log)
	if err != nil {
		return err
	}
	defer log.Close()
	s.cmd = exec.Command(s.binary, "--data-dir", s.layout.Data, "--run-dir", s.layout.Run, "up",
		"--listen", "127.0.0.1:0", "--listen-data", "127.0.0.1:0", "--stop-on-exit", "--log-level", "warn",
		"--max-sandboxes", "20000", "--max-sandboxes-per-tenant", "20000", "--templates-dir", templates)
	s.cmd.Stdout, s.cmd.Stderr = log, log
	s.cmd.SysProcAttr = &syscall.SysProcAttr{Setpgid: true} // our Ctrl-C ends it in order, by close
	if err := s.cmd.Start(); err != nil {
		return fmt.Errorf("%w (run `make build` first)", err)
	}
	s.done = make(chan error, 1)
	go func() { s.done <- s.cmd.Wait() }()
	for end := time.Now().Add(20 * time.Minute); ; {
		if e, err := s.layout.ReadEndpoint(); err == nil {
			key, err := os.ReadFile(s.layout.AdminKey())
			if err != nil {
				return errors.Join(err, s.close())
			}
			s.Client = client.New(e.API, strings.TrimSpace(string(key)))
			if _, err := s.Health(ctx); err == nil {
				return nil
			}
		}
		select {
		case err := <-s.done:
			s.cmd = nil
			text, _ := os.ReadFile(s.log) // what is there must do
			return fmt.Errorf("the server ended: %w\n%s", err, tail(string(text)))
		case <-ctx.Done():
			return errors.Join(ctx.Err(), s.close())
		case <-time.After(20 * time.Millisecond):
			if time.Now().After(end) {
				return errors.Join(errors.New("the server is not ready after 20 minutes"), s.close())
			}
		}
	}
}

func tail(s string) string { return s[max(0, len(s)-4000):] }

// close deletes every sandbox and ends the server.
func (s *server) close() error {
	if s.cmd == nil {
		return nil
	}
	var errs []error
	if s.Client != nil {
		ctx, cancel := context.WithTimeout(context.Background(), 2*wait)
		defer cancel()
		l, err := s.Sandboxes(ctx, client.ListOptions{Limit: 1000, Metadata: map[string]string{"bench": "live"}})
		errs = append(errs, err)
		for _, sb := range l.Items {
			errs = append(errs, s.remove(ctx, sb.ID))
		}
	}
	errs = append(errs, s.halt())
	return errors.Join(errs...)
}

// halt ends the server, with sandboxes powered off.
func (s *server) halt() error {
	cmd := s.cmd
	s.cmd = nil
	_ = cmd.Process.Signal(syscall.SIGTERM) // already gone is told by Wait
	select {
	case err := <-s.done:
		return err
	case <-time.After(90 * time.Second):
		_ = cmd.Process.Kill()
		return errors.Join(errors.New("the server did not end and was killed"), <-s.done)
	}
}

// newSandbox creates one and waits until it runs.
func (s *server) newSandbox(ctx context.Context, template string, r spaceapi.Resources) (spaceapi.Sandbox, error) {
	m, err := s.CreateSandbox(ctx, spaceapi.CreateSandbox{
		Template: template, TimeoutSeconds: 7200, Resources: r, Metadata: map[string]string{"bench": "live"},
	}, client.Wait(wait))
	if err != nil {
		return spaceapi.Sandbox{}, err
	}
	if m.Operation.State != "succeeded" {
		if _, err := s.AwaitOperation(ctx, m.Operation); err != nil {
			return m.Sandbox, err
		}
	}
	return m.Sandbox, nil
}

func (s *server) remove(ctx context.Context, id string) error {
	m, err := s.DeleteSandbox(ctx, id, client.Wait(wait))
	if err == nil && m.Operation.State != "succeeded" {
		_, err = s.AwaitOperation(ctx, m.Operation)
	}
	return err
}

// run executes a command whole and insists on exit code 0.
func (s *server) run(ctx context.Context, id string, args ...string) error {
	r, err := s.Exec(ctx, id, spaceapi.Exec{Command: spaceapi.Command{Args: args}})
	if err == nil && (r.Exit.Cause != "exited" || r.Exit.Code != 0) {
		err = fmt.Errorf("%v: %s %d", args, r.Exit.Cause, r.Exit.Code)
	}
	return err
}
