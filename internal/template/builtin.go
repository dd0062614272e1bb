package template

import "slices"

const searchPath = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"

// Builtin returns the recipes that come with SPACE: base:latest, in which people
// and agents work, and tiny:latest, a shell and little else.
func Builtin() []Recipe { return []Recipe{base(), tiny()} }

// Lookup returns the built-in recipe of that reference ("base" means
// "base:latest"). Errors: ErrInvalid, ErrNotFound.
func Lookup(ref string) (Recipe, error) {
	name, tag, err := ParseReference(ref)
	if err != nil {
		return Recipe{}, err
	}
	for _, r := range Builtin() {
		if r.Name == name && r.Tag == tag {
			return r, nil
		}
	}
	return Recipe{}, notFound(name + ":" + tag)
}

// Files that must not tell which machine built them, in both templates.
var common = []File{
	{Path: "/etc/hostname", Content: "sandbox\n", Mode: 0o644},
	{Path: "/etc/hosts", Content: "127.0.0.1\tlocalhost sandbox\n::1\tlocalhost ip6-localhost ip6-loopback\n", Mode: 0o644},
	{Path: "/etc/resolv.conf", Mode: 0o644},
	{Path: "/etc/machine-id", Mode: 0o444},
	// Mount points and scratch space that every machine needs.
	{Path: "/dev", Dir: true, Mode: 0o755},
	{Path: "/proc", Dir: true, Mode: 0o555},
	{Path: "/sys", Dir: true, Mode: 0o555},
	{Path: "/run", Dir: true, Mode: 0o755},
	{Path: "/tmp", Dir: true, Mode: 0o1777},
	{Path: "/var/tmp", Dir: true, Mode: 0o1777},
}

func base() Recipe {
	return Recipe{
		Name: "base", Tag: "latest",
		Suite: "bookworm", Variant: "minbase",
		Packages: []string{
			"bash", "ca-certificates", "coreutils", "curl", "git", "less", "nodejs",
			"procps", "python3", "python3-pip", "python-is-python3", "python3-venv", "sudo",
		},
		Setup: `
useradd --uid 1000 --user-group --create-home --home-dir /home/user --shell /bin/bash user
passwd -l root >/dev/null
# Python files are compiled when a package is configured, with the time of the
# source in them. Times are not part of a template, so they are compiled anew
# with nothing in them to compare.
find / -xdev -name __pycache__ -type d -prune -exec rm -rf {} +
python3 -m compileall -q -j 1 --invalidation-mode unchecked-hash /usr/lib/python3 /usr/lib/python3.*/ >/dev/null || true
`,
		Drop: []string{
			// Documentation is half of the size; licences (copyright files) are kept.
			"/usr/share/man/*", "/usr/share/info/*", "/usr/share/lintian", "/usr/share/bug", "/usr/share/doc-base",
			"/usr/share/locale/*",
			// pip would refuse to install: its guard protects a machine that people
			// keep; a sandbox is thrown away.
			"/usr/lib/python3.*/EXTERNALLY-MANAGED",
		},
		Files: append(slices.Clone(common),
			File{Path: "/etc/sudoers.d/user", Content: "user ALL=(ALL:ALL) NOPASSWD: ALL\n", Mode: 0o440},
			File{Path: "/etc/apt/apt.conf.d/90space", Content: "APT::Install-Recommends \"false\";\nAcquire::Languages \"none\";\n", Mode: 0o644},
		),
		Config: Config{
			Env:  map[string]string{"PATH": searchPath, "LANG": "C.UTF-8"},
			User: "user", WorkDir: "/home/user", Shell: "/bin/bash",
		},
	}
}

func tiny() Recipe {
	files := append(slices.Clone(common),
		File{Path: "/etc/passwd", Mode: 0o644, Content: "root:x:0:0:root:/root:/bin/sh\n" +
			"nobody:x:65534:65534:nobody:/nonexistent:/bin/false\n" +
			"user:x:1000:1000:user:/home/user:/bin/sh\n"},
		File{Path: "/etc/group", Mode: 0o644, Content: "root:x:0:\ntty:x:5:\nnogroup:x:65534:\nuser:x:1000:\n"},
		File{Path: "/etc/shadow", Mode: 0o600, Content: "root:*:19000:0:99999:7:::\nuser:*:19000:0:99999:7:::\n"},
		File{Path: "/root", Dir: true, Mode: 0o700},
		File{Path: "/home/user", Dir: true, Mode: 0o755, UID: 1000, GID: 1000},
		File{Path: "/usr/bin/env", Target: "/bin/busybox"},
	)
	for _, applet := range applets {
		files = append(files, File{Path: "/bin/" + applet, Target: "busybox"})
	}
	return Recipe{
		Name: "tiny", Tag: "latest",
		Suite: "bookworm", Variant: "extract",
		Packages: []string{"busybox-static"},
		Drop:     []string{"/usr/share/*", "/var/lib/dpkg", "/var/lib/apt", "/etc/apt", "/etc/dpkg"},
		Files:    files,
		Config: Config{
			Env:  map[string]string{"PATH": searchPath},
			User: "user", WorkDir: "/home/user", Shell: "/bin/sh",
		},
	}
}
