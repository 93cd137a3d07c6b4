//! Which mount is at a directory, as `/proc/self/mountinfo` tells. A mount whose daemon does not answer is not touched.

use std::io;
use std::os::unix::ffi::OsStrExt;
use std::path::Path;

/// Number of a mounted file system.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Device {
    major: u32,
    minor: u32,
}

impl Device {
    /// Ends its connection, if the kernel shows connections (`fusectl`): its owner may.
    ///
    /// # Errors
    /// Not shown, or gone.
    pub(crate) fn abort(self) -> io::Result<()> {
        std::fs::write(
            format!("/sys/fs/fuse/connections/{}/abort", self.minor),
            "1",
        )
    }
}

/// The file system mounted at `dir`, which is absolute and without links; the newest of several.
pub(crate) fn device_at(dir: &Path) -> Option<Device> {
    let text = std::fs::read("/proc/self/mountinfo").ok()?;
    newest(&text, &escaped(dir.as_os_str().as_bytes()))
}

/// The device of the last line for the mount point `dir`, spelt as there.
fn newest(text: &[u8], dir: &[u8]) -> Option<Device> {
    let lines = text.split(|&byte| byte == b'\n').rev();
    let mut found = lines.filter_map(|line| {
        let mut fields = line.split(|&byte| byte == b' ').skip(2);
        let (device, dir) = (fields.next()?, fields.nth(1)?);
        Some((device, dir))
    });
    let (device, _) = found.find(|(_, at)| *at == dir)?;
    let (major, minor) = std::str::from_utf8(device).ok()?.split_once(':')?;
    Some(Device {
        major: major.parse().ok()?,
        minor: minor.parse().ok()?,
    })
}

fn escaped(path: &[u8]) -> Vec<u8> {
    let mut out = Vec::with_capacity(path.len());
    for &byte in path {
        match byte {
            b' ' | b'\t' | b'\n' | b'\\' => out.extend(format!("\\{byte:03o}").bytes()),
            _ => out.push(byte),
        }
    }
    out
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_newest_mount_at_a_directory_is_found_whatever_its_name() {
        let text = b"36 35 8:1 / / rw - ext4 /dev/vda rw\n\
            41 36 0:50 / /mnt/a\\040b rw,relatime shared:1 - fuse.ramet /v rw\n\
            42 41 0:51 / /mnt/a\\040b rw,relatime - fuse.ramet /w rw\n\
            43 36 0:52 / /mnt/a rw - tmpfs t rw\n";
        let at = |dir: &str| newest(text, &escaped(dir.as_bytes()));
        let device = |major, minor| Some(Device { major, minor });
        assert_eq!(at("/mnt/a b"), device(0, 51));
        assert_eq!(at("/mnt/a"), device(0, 52));
        assert_eq!(at("/"), device(8, 1));
        assert_eq!(at("/mnt"), None);
        assert!(device_at(Path::new("/proc")).is_some());
    }
}
