package template

// applets are the commands of Debian's busybox that tiny links to it: those that
// make sense in a machine without hardware, boot or package manager.
var applets = []string{
	"[", "[[", "ar", "arch", "arp", "arping", "ascii", "ash", "awk", "base64", "basename",
	"blockdev", "bunzip2", "bzcat", "bzip2", "cal", "cat", "chgrp", "chmod", "chown", "chroot",
	"clear", "cmp", "cp", "cpio", "crc32", "cut", "date", "dc", "dd", "df", "diff", "dirname",
	"dmesg", "dnsdomainname", "dos2unix", "du", "echo", "ed", "egrep", "env", "expand", "expr",
	"factor", "fallocate", "false", "fgrep", "find", "findfs", "fold", "free", "getopt", "grep",
	"groups", "gunzip", "gzip", "head", "hexdump", "hostid", "hostname", "httpd", "id", "ifconfig",
	"ionice", "ip", "kill", "killall", "last", "less", "link", "linux32", "linux64", "ln",
	"logger", "logname", "losetup", "ls", "lzcat", "lzma", "md5sum", "mkdir", "mkfifo", "mknod",
	"mkpasswd", "mktemp", "more", "mount", "mv", "nc", "netstat", "nl", "nologin", "nproc",
	"nsenter", "nslookup", "od", "paste", "patch", "pidof", "ping", "ping6", "pivot_root",
	"printf", "ps", "pwd", "readlink", "realpath", "renice", "reset", "rev", "rm", "rmdir",
	"route", "run-parts", "sed", "seq", "setpriv", "setsid", "sh", "sha1sum", "sha256sum",
	"sha3sum", "sha512sum", "shred", "shuf", "sleep", "sort", "start-stop-daemon", "stat",
	"strings", "stty", "sync", "sysctl", "tac", "tail", "tar", "taskset", "tc", "tee", "telnet",
	"test", "time", "timeout", "top", "touch", "tr", "traceroute", "traceroute6", "true",
	"truncate", "ts", "tty", "umount", "uname", "uncompress", "unexpand", "uniq", "unix2dos",
	"unlink", "unlzma", "unshare", "unxz", "unzip", "uptime", "usleep", "uudecode", "uuencode",
	"vi", "w", "watch", "wc", "wget", "which", "who", "whoami", "xargs", "xxd", "xz", "xzcat",
	"yes", "zcat",
}
