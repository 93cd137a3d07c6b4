//! Mount options, as `mount -o` spells them.

use ramet_block::Codec;

use crate::{Error, Result};

/// How requests come from the kernel.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Transport {
    /// Through io_uring if the kernel offers it.
    #[default]
    Any,
    /// Through io_uring; has the kernel offer it.
    Ring,
    /// Through `/dev/fuse`.
    Device,
}

/// How to mount.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct MountOptions {
    /// Shown as the source of the mount: the path of the volume.
    pub fsname: String,
    /// Refuse changes in the kernel already.
    pub read_only: bool,
    /// Ignore setuid and setgid bits.
    pub nosuid: bool,
    /// Refuse to open device nodes.
    pub nodev: bool,
    /// Refuse to execute files.
    pub noexec: bool,
    /// Never change access times when reading.
    pub noatime: bool,
    /// Serve every user, not only the one who mounts. Root's mounts do by default.
    pub allow_other: bool,
    /// Compression of data written while mounted; `None` takes the volume's.
    pub compression: Option<Codec>,
    /// Threads that serve requests; 0 leaves the choice to us.
    pub threads: usize,
    /// Send small files to the kernel before they are asked for, to programs that read directories in order.
    pub ahead: bool,
    /// The way of requests.
    pub transport: Transport,
}

impl MountOptions {
    /// The defaults for the user who runs this process.
    #[must_use]
    pub fn new(fsname: &str) -> Self {
        Self {
            fsname: fsname.to_owned(),
            read_only: false,
            nosuid: false,
            nodev: false,
            noexec: false,
            noatime: false,
            allow_other: rustix::process::geteuid().is_root(),
            compression: None,
            threads: 0,
            ahead: true,
            transport: Transport::Any,
        }
    }

    /// Adds a comma-separated list, later ones winning: `ro`, `rw`, `suid`, `nosuid`, `dev`, `nodev`,
    /// `exec`, `noexec`, `atime`, `relatime`, `noatime`, `allow_other`, `fsname=TEXT`,
    /// `compression=CODEC`, `threads=N`, `ahead`, `no_ahead`, `io_uring`, `no_io_uring`, and `defaults`, `auto`, `noauto`, `user`, `nofail`, `_netdev` and `x-*`, which
    /// concern only mount(8) and are ignored.
    ///
    /// # Errors
    /// `UnknownOption` for anything else, `UnknownCodec`.
    pub fn add(&mut self, list: &str) -> Result<()> {
        for option in list
            .split(',')
            .map(str::trim)
            .filter(|option| !option.is_empty())
        {
            match option.split_once('=').unwrap_or((option, "")) {
                ("ro", "") => self.read_only = true,
                ("rw", "") => self.read_only = false,
                ("nosuid", "") => self.nosuid = true,
                ("suid", "") => self.nosuid = false,
                ("nodev", "") => self.nodev = true,
                ("dev", "") => self.nodev = false,
                ("noexec", "") => self.noexec = true,
                ("exec", "") => self.noexec = false,
                ("noatime", "") => self.noatime = true,
                ("atime" | "relatime", "") => self.noatime = false,
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
                ("threads", number) => {
                    self.threads = number
                        .parse()
                        .map_err(|_| Error::UnknownOption(option.to_owned()))?;
                }
                ("defaults" | "auto" | "noauto" | "user" | "nofail" | "_netdev", "") => {}
                (name, _) if name.starts_with("x-") => {}
                _ => return Err(Error::UnknownOption(option.to_owned())),
            }
        }
        Ok(())
    }
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
        assert!(!options.read_only && options.nosuid && options.noatime);
        assert_eq!((options.threads, options.fsname.as_str()), (3, "a=b"));
        assert!(
            matches!(options.add("sync=1"), Err(Error::UnknownOption(name)) if name == "sync=1")
        );
    }
}
