//! Mount options, as `mount -o` spells them.

use std::path::PathBuf;

use ramet_block::Codec;
use ramet_fs::AccessTime;

use crate::error::{Error, Result};

/// The way on which requests come from the kernel.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Transport {
    /// Through io_uring if the kernel offers it.
    #[default]
    Any,
    /// Through io_uring, which the kernel is asked to offer. Where the kernel has none, requests
    /// come through `/dev/fuse`, and [`crate::Mounted::no_rings`] tells the reason.
    Ring,
    /// Through `/dev/fuse`.
    Device,
}

/// The changes that are durable before they are answered.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Durability {
    /// No change: `fsync` makes changes durable.
    #[default]
    OnRequest,
    /// Changes of directories, as `dirsync` asks. The daemon makes all changes durable.
    Directories,
    /// All changes.
    Everything,
}

/// The users that may look into snapshots below the mount point (docs/views.md).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Views {
    /// Nobody: there is no such place.
    None,
    /// The user of the mount, and root.
    Owner,
    /// All users of the mount, by the modes of then.
    All,
}

/// The options of a mount.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct MountOptions {
    /// Shown as the source of the mount: the path of the volume.
    pub fsname: String,
    /// Refuse changes, in the kernel already.
    pub read_only: bool,
    /// Show the state before the first loss when the journal has lost acknowledged changes. Goes with
    /// `read_only` only.
    pub recovery: bool,
    /// Ignore setuid and setgid bits.
    pub nosuid: bool,
    /// Refuse to open device nodes.
    pub nodev: bool,
    /// Refuse to execute files.
    pub noexec: bool,
    /// Refuse to follow symbolic links.
    pub nosymfollow: bool,
    /// Have another process remove the mount when the daemon is killed. The process that serves
    /// the mount starts it.
    pub auto_unmount: bool,
    /// Options about labels of SELinux, as they were given.
    pub labels: Vec<String>,
    /// How reading a file changes its access time.
    pub access_time: AccessTime,
    /// Whether reading a directory changes its access time too, in the same way.
    pub dir_access_time: bool,
    /// The changes that are durable before they are answered.
    pub durability: Durability,
    /// Serve every user, not only the mounting user. The default for mounts of root.
    pub allow_other: bool,
    /// Compression of data written while mounted; `None` takes the volume's compression.
    pub compression: Option<Codec>,
    /// Threads that serve requests; 0 leaves the choice to the server.
    pub threads: usize,
    /// Send small files to the kernel before it asks for them, to programs that read directories in
    /// order.
    pub ahead: bool,
    /// The way on which requests come.
    pub transport: Transport,
    /// The users that may look into snapshots.
    pub views: Views,
    /// The subtype, which is `fuse.` and this in the list of mounts.
    pub subtype: &'static str,
    /// fusermount3, by its name or its path.
    pub helper: PathBuf,
}

impl MountOptions {
    /// The defaults for the user of this process.
    #[must_use]
    pub fn new(fsname: &str) -> Self {
        Self {
            fsname: fsname.to_owned(),
            read_only: false,
            recovery: false,
            nosuid: false,
            nodev: false,
            noexec: false,
            nosymfollow: false,
            auto_unmount: false,
            labels: Vec::new(),
            access_time: AccessTime::Relative,
            dir_access_time: true,
            durability: Durability::OnRequest,
            allow_other: rustix::process::geteuid().is_root(),
            compression: None,
            threads: 0,
            ahead: true,
            transport: Transport::Any,
            views: Views::Owner,
            subtype: "ramet",
            helper: "fusermount3".into(),
        }
    }

    /// Adds a comma-separated list of options. The last of two conflicting options wins.
    ///
    /// - Options of mount(8): `ro`, `rw`, `suid`, `nosuid`, `dev`, `nodev`, `exec`, `noexec`,
    ///   `symfollow`, `nosymfollow`, `sync`, `dirsync`, `async`, `allow_other`, `auto_unmount`.
    /// - Labels of SELinux: `context=`, `fscontext=`, `defcontext=`, `rootcontext=`. The kernel gets
    ///   them if it has SELinux; otherwise they have no effect, as with mount(8).
    /// - Access times: `relatime` and `atime` (once after each change, and daily; the default),
    ///   `strictatime`, `noatime`, `diratime`, `nodiratime`, and `norelatime` and `nostrictatime`,
    ///   which undo `strictatime`.
    /// - Options of Ramet: `recovery` (with `ro` only), `compression=CODEC`, `threads=N`, `ahead`, `no_ahead`, `io_uring`,
    ///   `no_io_uring`, `views=none`, `views=owner`, `views=all`, `fsname=TEXT`.
    /// - Accepted because they always hold, such as `lazytime`.
    /// - Accepted because mount(8) or the service manager acts on them, such as `nofail`, `x-*` and
    ///   `X-*`.
    ///
    /// `docs/mount-options.md` has a table of all of them.
    ///
    /// # Errors
    /// `RefusedOption` for an option that cannot be honoured, with the reason; `UnknownCodec`;
    /// `UnknownOption` for any other option.
    pub fn add(&mut self, list: &str) -> Result<()> {
        for option in options_in(list) {
            self.add_one(option)?;
        }
        Ok(())
    }

    fn add_one(&mut self, option: &str) -> Result<()> {
        match option.split_once('=').unwrap_or((option, "")) {
            ("ro", "") => self.read_only = true,
            ("rw", "") => self.read_only = false,
            ("recovery", "") => self.recovery = true,
            ("nosuid", "") => self.nosuid = true,
            ("suid", "") => self.nosuid = false,
            ("nodev", "") => self.nodev = true,
            ("dev", "") => self.nodev = false,
            ("noexec", "") => self.noexec = true,
            ("exec", "") => self.noexec = false,
            ("nosymfollow", "") => self.nosymfollow = true,
            ("symfollow", "") => self.nosymfollow = false,
            ("auto_unmount", "") => self.auto_unmount = true,
            ("context" | "fscontext" | "defcontext" | "rootcontext", label)
                if !label.is_empty() =>
            {
                self.labels.push(option.to_owned());
            }
            ("noatime", "") => self.access_time = AccessTime::Never,
            ("strictatime", "") => self.access_time = AccessTime::Strict,
            ("atime" | "relatime", "") => self.access_time = AccessTime::Relative,
            ("norelatime" | "nostrictatime", "") => {
                if self.access_time == AccessTime::Strict {
                    self.access_time = AccessTime::Relative;
                }
            }
            ("nodiratime", "") => self.dir_access_time = false,
            ("diratime", "") => self.dir_access_time = true,
            ("sync", "") => self.durability = Durability::Everything,
            ("dirsync", "") => {
                if self.durability == Durability::OnRequest {
                    self.durability = Durability::Directories;
                }
            }
            ("async", "") => self.durability = Durability::OnRequest,
            ("allow_other", "") => self.allow_other = true,
            ("fsname", text) if !text.is_empty() => self.fsname = text.to_owned(),
            ("compression", codec) => {
                let unknown = |why| Error::UnknownCodec(codec.to_owned(), why);
                self.compression = Some(codec.parse().map_err(unknown)?);
            }
            ("ahead", "") => self.ahead = true,
            ("no_ahead", "") => self.ahead = false,
            ("io_uring", "") => self.transport = Transport::Ring,
            ("no_io_uring", "") => self.transport = Transport::Device,
            ("views", "none") => self.views = Views::None,
            ("views", "owner") => self.views = Views::Owner,
            ("views", "all") => self.views = Views::All,
            ("threads", number) => {
                self.threads = number
                    .parse()
                    .map_err(|_| Error::UnknownOption(option.to_owned()))?;
            }
            (name, value) if holds_anyway(name, value) || is_for_others(name, value) => {}
            (name, _) => {
                return Err(match why_refused(name) {
                    Some(why) => Error::RefusedOption(option.to_owned(), why),
                    None => Error::UnknownOption(option.to_owned()),
                });
            }
        }
        Ok(())
    }
}

/// The options in a comma-separated list. A comma in double quotes belongs to its option.
pub fn options_in(list: &str) -> impl Iterator<Item = &str> {
    let mut is_quoted = false;
    let options = list.split(move |letter| {
        is_quoted ^= letter == '"';
        letter == ',' && !is_quoted
    });
    options.map(str::trim).filter(|option| !option.is_empty())
}

/// Options whose effect every mount has.
///
/// Access times are kept in memory and all other times are stored with each change, as `lazytime`
/// and `nolazytime` ask. The kernel checks permissions, and the volume has extended attributes and
/// access control lists. Freed space goes back to the host, and no device for a loop is needed.
pub(crate) const HOLDING: [&str; 12] = [
    "default_permissions",
    "lazytime",
    "nolazytime",
    "nomand",
    "noiversion",
    "loud",
    "silent",
    "acl",
    "user_xattr",
    "discard",
    "noquota",
    "loop",
];

/// Options on which mount(8) or the reader of fstab(5) acts. Those with `=` take a value.
pub(crate) const FOR_OTHERS: [&str; 15] = [
    "defaults", "auto", "noauto", "user", "users", "nousers", "nouser", "owner", "noowner",
    "group", "nogroup", "nofail", "_netdev", "comment=", "user=",
];

/// Options that mount(8) or other file systems know, and why they are refused.
pub(crate) const REFUSED: [(&[&str], &str); 12] = [
    (&["mand"], "Linux has no mandatory locks any more"),
    (
        &["iversion"],
        "files have no counter of their changes that programs could read",
    ),
    (
        &["allow_root"],
        "a mount serves its user or, with allow_other, all users",
    ),
    (
        &["remount"],
        "use mount -o remount,ro DIR, or unmount and mount again",
    ),
    (
        &[
            "bind",
            "rbind",
            "move",
            "shared",
            "rshared",
            "slave",
            "rslave",
            "private",
            "rprivate",
            "unbindable",
            "runbindable",
        ],
        "it is about a mount that stands: use mount(8) when the volume is mounted",
    ),
    (
        &["noacl", "nouser_xattr"],
        "access control lists and extended attributes are always on",
    ),
    (&["nodiscard"], "freed space always goes back"),
    (
        &["quota", "usrquota", "grpquota", "prjquota"],
        "there are no quotas",
    ),
    (
        &["uid", "gid", "umask", "fmask", "dmask"],
        "files have owners and modes of their own: an idmapped mount shows other owners",
    ),
    (
        &["offset", "sizelimit"],
        "make a loop device of the part with losetup(8)",
    ),
    (
        &["norecovery", "noload"],
        "a volume that was not closed is recovered in memory with ro",
    ),
    (
        &[
            "max_read", "blksize", "subtype", "fd", "rootmode", "user_id", "group_id",
        ],
        "the daemon agrees on it with the kernel",
    ),
];

/// Whether every mount has the effect of this option.
fn holds_anyway(name: &str, value: &str) -> bool {
    HOLDING.contains(&name) && value.is_empty()
}

/// Whether mount(8) or the reader of fstab(5) acts on this option.
fn is_for_others(name: &str, value: &str) -> bool {
    let takes_value = |known: &&str| known.strip_suffix('=') == Some(name);
    name.starts_with("x-")
        || name.starts_with("X-")
        || FOR_OTHERS.iter().any(takes_value)
        || FOR_OTHERS.contains(&name) && value.is_empty()
}

/// The reason why an option that mount(8) knows is refused.
fn why_refused(name: &str) -> Option<&'static str> {
    let refused = REFUSED.iter().find(|(names, _)| names.contains(&name));
    refused.map(|(_, why)| *why)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn later_options_win_and_unknown_ones_are_named() {
        let mut options = MountOptions::new("vol");
        options
            .add("ro,nosuid,defaults,x-systemd.automount")
            .unwrap();
        options
            .add("rw, noatime,threads=3,fsname=a=b,compression=zstd:3,io_uring,no_io_uring,ahead,no_ahead")
            .unwrap();
        assert_eq!(options.transport, Transport::Device);
        assert!(!options.ahead);
        assert_eq!(options.compression, "zstd:3".parse().ok());
        let gzip = options.add("compression=gzip").unwrap_err().to_string();
        assert!(
            gzip.contains("`compression=gzip`") && gzip.contains("lz4"),
            "{gzip}"
        );
        assert!(!options.read_only && options.nosuid);
        assert_eq!(options.access_time, AccessTime::Never);
        assert_eq!((options.threads, options.fsname.as_str()), (3, "a=b"));
        assert!(
            matches!(options.add("sync=1"), Err(Error::UnknownOption(name)) if name == "sync=1")
        );
    }

    #[test]
    fn labels_keep_the_commas_in_their_quotes() {
        let label = r#"context="system_u:object_r:tmp_t:s0:c127,c456""#;
        let options = with(&format!(
            "nosymfollow,{label},rootcontext=a:b,symfollow,auto_unmount"
        ));
        assert_eq!(options.labels, [label, "rootcontext=a:b"]);
        assert!(!options.nosymfollow && options.auto_unmount);
        assert!(MountOptions::new("vol").add("context=").is_err());
    }

    /// The table tells every option with its kind, and the reason of each refusal.
    #[test]
    fn table_of_options_is_complete() {
        let path = concat!(env!("CARGO_MANIFEST_DIR"), "/../../docs/mount-options.md");
        let text = std::fs::read_to_string(path).unwrap();
        let rows = text.lines().filter_map(|line| line.strip_prefix("| `"));
        let mut told = std::collections::BTreeSet::new();
        for row in rows {
            let cells: Vec<_> = row.split(" | ").collect();
            let [names, kind, _, effect] = cells[..] else {
                panic!("{row}");
            };
            for name in names.trim_end_matches('`').split("`, `") {
                let option = match name.split_once('=') {
                    Some((name, "CODEC")) => format!("{name}=lz4"),
                    Some(("views", _)) => name.to_owned(),
                    Some((name, _)) => format!("{name}=1"),
                    None => name.to_owned(),
                };
                let bare = name.split('=').next().unwrap();
                told.insert(bare.to_owned());
                let added = MountOptions::new("vol").add(&option);
                let found = match (&added, bare) {
                    (Err(Error::RefusedOption(_, why)), _) => {
                        assert!(effect.starts_with(why), "{name}: {why}");
                        "refused"
                    }
                    (_, "memory" | "cache_size" | "log" | "snapshot") => "done",
                    (Err(error), _) => panic!("{name}: {error}"),
                    (Ok(()), _) if HOLDING.contains(&bare) => "holds",
                    (Ok(()), _) if is_for_others(bare, "") => "elsewhere",
                    (Ok(()), _) => "done",
                };
                assert_eq!(found, kind, "{name}");
            }
        }
        let refused = REFUSED.iter().flat_map(|(names, _)| names.iter());
        for known in HOLDING.iter().chain(&FOR_OTHERS).chain(refused) {
            let known = known.trim_end_matches('=');
            assert!(told.contains(known), "{known} is not in the table");
        }
    }

    fn with(list: &str) -> MountOptions {
        let mut options = MountOptions::new("vol");
        options.add(list).unwrap();
        options
    }

    #[test]
    fn access_times_are_as_the_last_option_says() {
        for (list, files, dirs) in [
            ("defaults", AccessTime::Relative, true),
            ("strictatime", AccessTime::Strict, true),
            ("noatime,strictatime,nodiratime", AccessTime::Strict, false),
            ("strictatime,nostrictatime", AccessTime::Relative, true),
            ("noatime,norelatime", AccessTime::Never, true),
            ("strictatime,atime", AccessTime::Relative, true),
            ("nodiratime,diratime,lazytime", AccessTime::Relative, true),
        ] {
            let options = with(list);
            let found = (options.access_time, options.dir_access_time);
            assert_eq!(found, (files, dirs), "{list}");
        }
    }

    #[test]
    fn durability_is_as_the_last_option_says() {
        for (list, durability) in [
            ("defaults", Durability::OnRequest),
            ("sync", Durability::Everything),
            ("dirsync", Durability::Directories),
            ("sync,dirsync", Durability::Everything),
            ("dirsync,sync", Durability::Everything),
            ("sync,dirsync,async", Durability::OnRequest),
        ] {
            assert_eq!(with(list).durability, durability, "{list}");
        }
    }

    #[test]
    fn options_of_mount_8_change_nothing_and_impossible_ones_are_refused_with_the_reason() {
        let others = "defaults,auto,noauto,user,user=ann,users,nouser,owner,group,nofail,_netdev,\
                      x-systemd.automount,X-mount.mkdir=0755,comment=x,lazytime,nomand,silent,acl";
        assert_eq!(with(others), MountOptions::new("vol"));
        for (option, word) in [
            ("mand", "mandatory"),
            ("remount", "again"),
            ("allow_root", "allow_other"),
            ("bind", "mount(8)"),
            ("usrquota", "quotas"),
            ("uid=5", "owners"),
        ] {
            let refused = MountOptions::new("vol").add(option).unwrap_err();
            assert!(matches!(refused, Error::RefusedOption(..)), "{option}");
            let said = refused.to_string();
            assert!(said.contains(option) && said.contains(word), "{said}");
        }
        for option in ["data=ordered", "sync=yes", "users=7", "lazytime=1"] {
            let refused = MountOptions::new("vol").add(option);
            assert!(matches!(refused, Err(Error::UnknownOption(_))), "{option}");
        }
    }
}
