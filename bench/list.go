package main

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"syscall"
	"time"

	"github.com/space-platform/space/client"
	"github.com/space-platform/space/internal/operation"
	"github.com/space-platform/space/internal/privilege"
	"github.com/space-platform/space/internal/sandbox"
	"github.com/space-platform/space/internal/store"
	"github.com/space-platform/space/internal/store/postgres"
	"github.com/space-platform/space/internal/store/sqlite"
	"github.com/space-platform/space/internal/tenant"
)

// The two sizes of a store that are compared.
const (
	few  = 100
	many = 10_000
	page = 100
)

// These rows take a millisecond or less: with few samples they would measure
// what else the machine does.
const (
	cheap     = 20
	cheapWarm = 50
)

// seed fills a store with sandboxes of the default tenant that have failed (they
// need no machine, so nothing changes them) and gives their ids, oldest first.
func seed(ctx context.Context, s store.Store, digest string, n int) ([]string, error) {
	t, err := s.System().EnsureTenant(ctx, tenant.Default)
	if err != nil {
		return nil, err
	}
	ids := make([]string, 0, n)
	start := time.Now().UTC().Truncate(time.Microsecond).Add(-time.Duration(n) * time.Second)
	for len(ids) < n {
		first := len(ids)
		err := s.Mutate(ctx, t, func(tx store.Tx) error {
			ids = ids[:first] // may run again
			for range min(500, n-first) {
				at := start.Add(time.Duration(len(ids)) * time.Second)
				row := store.Sandbox{
					Tenant: t, ID: sandbox.NewID(), Name: fmt.Sprintf("bench-%d", len(ids)), Template: "base:latest", TemplateDigest: digest,
					Accept: []sandbox.Class{sandbox.ClassUserKernel}, Class: sandbox.ClassUserKernel, Runtime: gvisorName, Resources: resources,
					Policy:   sandbox.Policy{ExpiresAt: at.Add(1000 * time.Hour), DeadlineAt: at.Add(1000 * time.Hour), OnExpire: sandbox.ActionStop},
					Metadata: map[string]string{"bench": "seeded", "group": fmt.Sprint(len(ids) % 10)}, Node: "local",
					Problem: &operation.Problem{Code: "machine_lost", What: "seeded"},
					Desired: sandbox.Running, Observed: sandbox.Failed, Generation: 1, Converged: 1, CreatedAt: at, UpdatedAt: at, CreatedBy: "bench",
				}
				if err := tx.InsertSandbox(row); err != nil {
					return err
				}
				ids = append(ids, string(row.ID))
			}
			return nil
		})
		if err != nil {
			return nil, err
		}
	}
	return ids, nil
}

// seeded starts a server whose store holds n sandboxes.
func (b *bench) seeded(ctx context.Context, n int) (s *server, ids []string, err error) {
	s, err = b.serve(ctx, fmt.Sprintf("l%d", n), b.binary) // makes database, tenant and key
	if err != nil {
		return nil, nil, err
	}
	if err := s.halt(); err != nil {
		return nil, nil, err
	}
	db, err := sqlite.Open(s.layout.ControlDB())
	if err != nil {
		return nil, nil, err
	}
	ids, err = seed(ctx, db, b.world.info.Digest, n)
	if err = errors.Join(err, db.Close()); err != nil {
		return nil, nil, err
	}
	uid, gid, err := privilege.Lookup()
	if err != nil {
		return nil, nil, err
	}
	files, err := filepath.Glob(s.layout.ControlDB() + "*") // we are root, and the log is ours now
	if err != nil {
		return nil, nil, err
	}
	for _, f := range files {
		if err := os.Chown(f, uid, gid); err != nil {
			return nil, nil, err
		}
	}
	return s, ids, s.start(ctx, b.templates)
}

// list compares reads of a large store with those of a small one.
func (b *bench) list(ctx context.Context) (err error) {
	small, smallIDs, err := b.seeded(ctx, few)
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, small.close()) }()
	large, largeIDs, err := b.seeded(ctx, many)
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, large.close()) }()
	fmt.Println("  get: GET /v1/sandboxes/{id}; list: GET /v1/sandboxes?limit=100, and with metadata")
	var getFew, getMany, listFew, listMany, metaFew, metaMany samples
	discard := samples{}
	i := 0
	err = turns(ctx, cheapWarm, cheap*b.n, func(count bool) error {
		i++
		for _, side := range []struct {
			s               *server
			ids             []string
			get, list, meta *samples
		}{{small, smallIDs, &getFew, &listFew, &metaFew}, {large, largeIDs, &getMany, &listMany, &metaMany}} {
			to := func(s *samples) *samples {
				if !count {
					return &discard
				}
				return s
			}
			id := side.ids[(i*7919)%len(side.ids)]
			err := to(side.get).time(func() error { _, err := side.s.Sandbox(ctx, id); return err })
			lister := func(o client.ListOptions, want int) func() error {
				return func() error {
					l, err := side.s.Sandboxes(ctx, o)
					if err == nil && len(l.Items) != want {
						err = fmt.Errorf("a page has %d items instead of %d", len(l.Items), want)
					}
					return err
				}
			}
			err = errors.Join(err,
				to(side.list).time(lister(client.ListOptions{Limit: page}, page)),
				to(side.meta).time(lister(client.ListOptions{Limit: page / 10, Metadata: map[string]string{"group": "3"}}, page/10)))
			if err != nil {
				return err
			}
		}
		return nil
	})
	if err != nil {
		return err
	}
	floor := fmt.Sprintf("the same with %d", few)
	b.add("get with 10 000 sandboxes", "sqlite", "ms", getMany, floor, getFew, target{most: 1.5})
	b.add("list with 10 000 sandboxes", "sqlite", "ms", listMany, floor, listFew, target{most: 1.5})
	b.add("list by metadata with 10 000 sandboxes", "sqlite", "ms", metaMany, floor, metaFew, target{most: 1.5})
	return b.listPostgres(ctx)
}

// listPostgres does the same at the store's interface, where PostgreSQL is installed.
func (b *bench) listPostgres(ctx context.Context) (err error) {
	pg, err := startPostgres(ctx, filepath.Join(b.run, "pg"))
	if err != nil || pg == nil {
		return err
	}
	defer func() { err = errors.Join(err, pg.stop()) }()
	type side struct {
		s         store.Store
		t         tenant.ID
		ids       []string
		get, list samples
	}
	sides := []*side{}
	for _, n := range []int{few, many} {
		dsn, err := pg.database(ctx, fmt.Sprintf("bench%d", n))
		if err != nil {
			return err
		}
		s, err := postgres.Open(dsn)
		if err != nil {
			return err
		}
		defer func() { err = errors.Join(err, s.Close()) }()
		ids, err := seed(ctx, s, b.world.info.Digest, n)
		if err != nil {
			return err
		}
		t, err := s.System().EnsureTenant(ctx, tenant.Default)
		if err != nil {
			return err
		}
		sides = append(sides, &side{s: s, t: t, ids: ids})
	}
	i := 0
	err = turns(ctx, cheapWarm, cheap*b.n, func(count bool) error {
		i++
		for _, v := range sides {
			var get, list samples
			id := sandbox.ID(v.ids[(i*7919)%len(v.ids)])
			err := errors.Join(
				get.time(func() error { _, err := v.s.Sandbox(ctx, v.t, id); return err }),
				list.time(func() error { _, err := v.s.Sandboxes(ctx, v.t, store.Filter{Limit: page}); return err }))
			if err != nil {
				return err
			}
			if count {
				v.get, v.list = append(v.get, get...), append(v.list, list...)
			}
		}
		return nil
	})
	if err != nil {
		return err
	}
	floor := fmt.Sprintf("the same with %d, at the store's interface", few)
	b.add("get with 10 000 sandboxes", "postgres", "ms", sides[1].get, floor, sides[0].get, target{most: 1.5})
	b.add("list with 10 000 sandboxes", "postgres", "ms", sides[1].list, floor, sides[0].list, target{most: 1.5})
	return nil
}

// cluster is a PostgreSQL of the benchmark's own, on a unix socket only.
type cluster struct {
	dir, bin string
	cmd      *exec.Cmd
	cred     *syscall.Credential
	log      bytes.Buffer
}

// startPostgres gives nil where PostgreSQL is not installed.
func startPostgres(ctx context.Context, dir string) (*cluster, error) {
	found, err := filepath.Glob("/usr/lib/postgresql/*/bin")
	if err != nil {
		return nil, err
	}
	if len(found) == 0 {
		fmt.Println("  PostgreSQL is not installed: its rows are left out")
		return nil, nil
	}
	slices.Sort(found)
	uid, gid, err := privilege.Lookup() // it refuses to run as root
	if err != nil {
		return nil, err
	}
	c := &cluster{dir: dir, bin: found[len(found)-1], cred: &syscall.Credential{Uid: uint32(uid), Gid: uint32(gid)}}
	if err := os.Mkdir(dir, 0o700); err != nil {
		return nil, err
	}
	if err := os.Chown(dir, uid, gid); err != nil {
		return nil, err
	}
	if out, err := c.command(ctx, "initdb", "-D", dir+"/data", "-U", "space", "-A", "trust", "-E", "UTF8", "--locale=C").CombinedOutput(); err != nil {
		return nil, fmt.Errorf("initdb: %w\n%s", err, out)
	}
	c.cmd = c.command(context.WithoutCancel(ctx), "postgres", "-D", dir+"/data", "-k", dir, "-c", "listen_addresses=")
	c.cmd.Stdout, c.cmd.Stderr = &c.log, &c.log
	if err := c.cmd.Start(); err != nil {
		return nil, err
	}
	for end := time.Now().Add(30 * time.Second); ; time.Sleep(50 * time.Millisecond) {
		if c.sql(ctx, "SELECT 1") == nil {
			return c, nil
		}
		if time.Now().After(end) {
			return nil, errors.Join(errors.New("postgres does not answer"), c.stop())
		}
	}
}

func (c *cluster) command(ctx context.Context, name string, args ...string) *exec.Cmd {
	cmd := exec.CommandContext(ctx, filepath.Join(c.bin, name), args...)
	cmd.Dir = c.dir
	cmd.Env = []string{"PATH=/usr/bin:/bin", "LANG=C"}
	cmd.SysProcAttr = &syscall.SysProcAttr{Credential: c.cred, Setpgid: true}
	return cmd
}

func (c *cluster) sql(ctx context.Context, text string) error {
	out, err := c.command(ctx, "psql", "-h", c.dir, "-U", "space", "-d", "postgres", "-c", text).CombinedOutput()
	if err != nil {
		return fmt.Errorf("psql: %w\n%s", err, out)
	}
	return nil
}

func (c *cluster) database(ctx context.Context, name string) (dsn string, err error) {
	return fmt.Sprintf("host=%s user=space dbname=%s sslmode=disable", c.dir, name), c.sql(ctx, "CREATE DATABASE "+name)
}

func (c *cluster) stop() error {
	_ = c.cmd.Process.Signal(syscall.SIGINT) // fast shutdown; Wait tells the rest
	done := make(chan error, 1)
	go func() { done <- c.cmd.Wait() }()
	select {
	case err := <-done:
		return err
	case <-time.After(20 * time.Second):
		_ = c.cmd.Process.Kill()
		return errors.Join(errors.New("postgres did not stop and was killed"), <-done)
	}
}
