package main

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"time"

	"github.com/space-platform/space/api/guestapi"
	"github.com/space-platform/space/internal/blob"
	"github.com/space-platform/space/internal/guestclient"
	"github.com/space-platform/space/internal/runtime"
	"github.com/space-platform/space/internal/runtime/gvisor"
	"github.com/space-platform/space/internal/sandbox"
	"github.com/space-platform/space/internal/template"
)

// world is the floor's side: the runtime driver in this process, without host
// room, node or control plane.
type world struct {
	conf      gvisor.Config
	runtime   *gvisor.Runtime
	templates *template.Store
	info      template.Info
	serial    int
}

// resources are the API's defaults, for both sides.
var resources = sandbox.Resources{MilliCPU: 1000, MemoryBytes: 512 << 20, DiskBytes: 2048 << 20, MaxProcesses: 1024}

func newWorld(_ context.Context, b *bench) (*world, error) {
	data, run := filepath.Join(b.data, "w"), filepath.Join(b.run, "w")
	w := &world{}
	var err error
	if w.templates, err = template.Open(template.Options{Dir: b.templates, RunDir: run}); err != nil {
		return nil, err
	}
	if w.info, err = w.templates.Resolve(b.template); err != nil {
		return nil, err
	}
	w.conf = gvisor.Config{DataDir: data, RunDir: run, Templates: w.templates, CgroupParent: filepath.Base(b.run)}
	if err := os.MkdirAll(data, 0o700); err != nil {
		return nil, err
	}
	if w.conf.RunscDigest, err = blob.Digest("runsc"); err != nil {
		return nil, fmt.Errorf("%w (run `make build` first)", err)
	}
	if w.conf.Runsc, err = blob.Extract(filepath.Join(data, "bin"), "runsc"); err != nil {
		return nil, err
	}
	if w.conf.GuestDaemon, err = blob.Extract(filepath.Join(data, "bin"), "space-guest"); err != nil {
		return nil, err
	}
	w.runtime, err = gvisor.New(w.conf)
	return w, err
}

func (w *world) close() error {
	ctx, cancel := context.WithTimeout(context.Background(), time.Minute)
	defer cancel()
	list, err := w.runtime.List(ctx)
	errs := []error{err}
	for _, st := range list {
		errs = append(errs, w.runtime.Destroy(ctx, st.Spec.ID))
	}
	return errors.Join(append(errs, w.runtime.Close(), w.runtime.Uninstall(ctx), w.templates.Unmount(w.info.Digest))...)
}

// machine boots a machine and configures its daemon as the node does.
func (w *world) machine(ctx context.Context) (runtime.Spec, *guestclient.Client, error) {
	spec := runtime.Spec{ID: sandbox.NewID(), TemplateDigest: w.info.Digest, Resources: resources}
	m, err := w.runtime.Create(ctx, spec)
	if err != nil {
		return spec, nil, err
	}
	if err := m.Start(ctx); err != nil {
		return spec, nil, err
	}
	g := guestclient.New(m.Dial, guestclient.Options{})
	if _, err := g.Hello(ctx); err != nil {
		return spec, nil, err
	}
	return spec, g, g.Configure(ctx, guestapi.Configure{
		SandboxID: string(spec.ID), Hostname: string(spec.ID), Now: time.Now().UTC(), Entropy: make([]byte, 64),
		Env: w.info.Config.Env, User: w.info.Config.User, WorkDir: w.info.Config.WorkDir,
	})
}

// byHand is a machine made with commands; nothing of ours but the guest daemon
// in it takes part.
type byHand struct {
	dir, id, netns string
	make, end      string // shell scripts
	tmp            string // where the scripts are
}

// mkfs is what package disk asks of mkfs.ext4 for an image of this size.
const mkfs = "mkfs.ext4 -q -F -t ext4 -b 4096 -I 256 -i 16384 -m 0" +
	" -O none,has_journal,ext_attr,dir_index,filetype,extent,64bit,flex_bg,sparse_super,large_file,huge_file,dir_nlink,extra_isize,metadata_csum" +
	" -E lazy_itable_init=1,lazy_journal_init=1,nodiscard,root_owner=0:0 -J size=32"

// byHand prepares the directories and the OCI document, outside of what is
// timed. The document is the driver's own for like, with other names in it, so
// that confinement, limits and mounts are the same.
func (w *world) byHand(ctx context.Context, like sandbox.ID) (*byHand, error) {
	w.serial++
	h := &byHand{
		id: string(sandbox.NewID()), netns: fmt.Sprintf("%s-%d", filepath.Base(filepath.Dir(w.conf.RunDir)), w.serial),
		dir: filepath.Join(filepath.Dir(w.conf.RunDir), "h"), tmp: filepath.Join(w.conf.DataDir, "hand"),
	}
	for _, d := range []string{"disk", "root", "channel", "bundle", "s"} {
		if err := os.MkdirAll(filepath.Join(h.dir, d), 0o700); err != nil {
			return nil, err
		}
	}
	if err := os.MkdirAll(h.tmp, 0o700); err != nil {
		return nil, err
	}
	lower, err := w.templates.Mount(ctx, w.info.Digest)
	if err != nil {
		return nil, err
	}
	live := filepath.Join(w.conf.RunDir, "m", string(like))
	doc, err := os.ReadFile(filepath.Join(live, "bundle", "config.json"))
	if err != nil {
		return nil, err
	}
	text := strings.NewReplacer(live, h.dir, filepath.Join(w.conf.RunDir, "netns", string(like)), "/run/netns/"+h.netns, string(like), h.id).Replace(string(doc))
	if err := os.WriteFile(filepath.Join(h.dir, "bundle.json"), []byte(text), 0o600); err != nil {
		return nil, err
	}
	runsc := w.conf.Runsc + " --root=" + h.dir + "/s --shared-root=" + w.conf.RunDir + "/shared --log=" + h.dir + "/log --log-format=json" +
		" --platform=systrap --network=sandbox --overlay2=none --file-access=exclusive --file-access-mounts=shared --host-uds=open" +
		" --host-fifo=none --net-raw=false --allow-suid=true --cpu-num-from-quota=true --host-settings=ignore"
	image := filepath.Join(h.tmp, h.id+".img")
	disk := h.dir + "/disk"
	h.make = strings.Join([]string{
		"set -e",
		"truncate -s " + fmt.Sprint(resources.DiskBytes) + " " + image,
		mkfs + " " + image,
		"mount -o loop,nosuid,nodev " + image + " " + disk,
		"mkdir " + disk + "/upper " + disk + "/work",
		"mount -t overlay -o nosuid,nodev,noatime,redirect_dir=on,index=off,metacopy=off,xino=off,lowerdir=" + lower + ",upperdir=" + disk + "/upper,workdir=" + disk + "/work overlay " + h.dir + "/root",
		"ip netns add " + h.netns,
		"ip -n " + h.netns + " link set lo up",
		"cp " + h.dir + "/bundle.json " + h.dir + "/bundle/config.json",
		runsc + " create --bundle=" + h.dir + "/bundle " + h.id + " </dev/null >/dev/null 2>&1",
		runsc + " start " + h.id + " </dev/null >/dev/null 2>&1",
		runsc + " exec " + h.id + " /bin/true </dev/null >/dev/null 2>&1",
	}, "\n")
	h.end = strings.Join([]string{
		runsc + " delete --force " + h.id + "",
		"umount " + h.dir + "/root " + disk,
		"ip netns del " + h.netns,
		"rm -rf --one-file-system " + h.dir + " " + image,
	}, "\n")
	return h, nil
}

// oneCommand is the same with create and start in one command of the runtime,
// which its makers do not use in engines but which is faster.
func (h *byHand) oneCommand() string {
	var out []string
	for line := range strings.Lines(h.make) {
		line = strings.TrimSuffix(line, "\n")
		switch {
		case strings.Contains(line, " start "+h.id):
			continue
		case strings.Contains(line, " create --bundle="):
			line = strings.Replace(line, " create --bundle=", " run --detach --bundle=", 1)
		}
		out = append(out, line)
	}
	return strings.Join(out, "\n")
}

// try makes the machine, timed, and tells what the runtime said when it fails.
func (h *byHand) try(ctx context.Context, script string) error {
	err := shell(ctx, script)
	if err != nil {
		log, _ := os.ReadFile(h.dir + "/log") // what is there must do
		err = fmt.Errorf("%w\n%s", err, tail(string(log)))
	}
	return err
}

func shell(ctx context.Context, script string) error {
	cmd := exec.CommandContext(ctx, "sh", "-c", script)
	cmd.Dir = "/"
	cmd.Env = []string{"PATH=/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"}
	out, err := cmd.CombinedOutput()
	if err != nil {
		return fmt.Errorf("%w: %s\n%s", err, bytes.TrimSpace(out), script)
	}
	return nil
}
