// Command bench measures the paths of design.md section 5 as ratios to a floor
// that is measured in the same run, prints the table and writes it to
// bench/results/latest.json. It needs root and `make build`.
//
// Floor and measured path take turns, so that what else the machine does meets
// both. Servers, machines and databases are the benchmark's own, and gone at its
// end; only built templates are kept (below -dir) for the next run.
package main

import (
	"context"
	"errors"
	"flag"
	"fmt"
	"os"
	"os/signal"
	"path/filepath"
	"strings"
	"syscall"
	"time"
)

// options are the flags.
type options struct {
	n        int
	dir      string
	template string
	rows     string
	out      string
	binary   string
	profile  string
}

// bench is one run.
type bench struct {
	options
	templates string // the template store
	data, run string // directories of this run
	rows      []row
	world     *world
	server    *server
}

func main() {
	var o options
	flag.IntVar(&o.n, "n", 30, "samples of each side of each row")
	flag.StringVar(&o.dir, "dir", "/var/lib/space-bench", "where templates are kept between runs; data of a run goes below it, too")
	flag.StringVar(&o.template, "template", "base:latest", "template of the sandboxes")
	flag.StringVar(&o.rows, "rows", "exec,create,stream,pause,memory,list", "which parts to measure")
	flag.StringVar(&o.out, "out", "bench/results/latest.json", "where the result goes; empty for nowhere")
	flag.StringVar(&o.binary, "space", "bin/space", "the program that is measured")
	flag.StringVar(&o.profile, "pprof", "", "directory for CPU profiles of the benchmark's own process")
	flag.Parse()
	ctx, stop := signal.NotifyContext(context.Background(), syscall.SIGINT, syscall.SIGTERM)
	defer stop()
	if err := measure(ctx, o); err != nil {
		fmt.Fprintln(os.Stderr, "bench:", err)
		stop()
		os.Exit(1)
	}
}

// parts of a run, in order.
var parts = []struct {
	name string
	do   func(*bench, context.Context) error
}{
	{"exec", (*bench).exec},
	{"stream", (*bench).stream},
	{"create", (*bench).create},
	{"pause", (*bench).pause},
	{"memory", (*bench).memory},
	{"list", (*bench).list},
}

func measure(ctx context.Context, o options) (err error) {
	if os.Geteuid() != 0 {
		return errors.New("machines need mounts and namespaces: run it as root")
	}
	if o.n < 30 {
		fmt.Fprintf(os.Stderr, "bench: %d samples are too few to publish; 30 are the rule\n", o.n)
	}
	want := map[string]bool{}
	for _, name := range strings.Split(o.rows, ",") {
		want[name] = true
	}
	if o.binary, err = filepath.Abs(o.binary); err != nil {
		return err
	}
	b := &bench{options: o, templates: filepath.Join(o.dir, "templates")}
	if demo := "/var/lib/space-demo/host/templates"; !exists(filepath.Join(b.templates, "names")) && exists(filepath.Join(demo, "names")) {
		b.templates = demo // the same templates; building them takes minutes
	}
	if err := os.MkdirAll(o.dir, 0o711); err != nil { // user space goes through it
		return err
	}
	if b.data, err = os.MkdirTemp(o.dir, "run-"); err != nil {
		return err
	}
	defer func() { err = errors.Join(err, os.RemoveAll(b.data)) }()
	if b.run, err = os.MkdirTemp("/run", "spb-"); err != nil { // short: socket addresses are
		return err
	}
	defer func() { err = errors.Join(err, os.RemoveAll(b.run)) }()
	for _, d := range []string{b.data, b.run} {
		if err := os.Chmod(d, 0o711); err != nil {
			return err
		}
	}

	fmt.Println("bench: starting a server (the first run builds the templates)")
	if b.server, err = b.serve(ctx, "m", o.binary); err != nil {
		return err
	}
	defer func() { err = errors.Join(err, b.server.close()) }()
	if b.world, err = newWorld(ctx, b); err != nil {
		return err
	}
	defer func() { err = errors.Join(err, b.world.close()) }()

	for _, p := range parts {
		if !want[p.name] {
			continue
		}
		began := time.Now()
		fmt.Printf("bench: %s\n", p.name)
		if err := b.profiled(p.name, func() error { return p.do(b, ctx) }); err != nil {
			return fmt.Errorf("%s: %w", p.name, err)
		}
		fmt.Printf("bench: %s took %s\n", p.name, time.Since(began).Round(time.Second))
	}
	printTable(os.Stdout, b.rows)
	if o.out != "" {
		return writeReport(o.out, b.rows)
	}
	return nil
}

func exists(path string) bool {
	_, err := os.Stat(path)
	return err == nil
}
