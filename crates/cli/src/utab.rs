//! The table in which libmount notes more of a mount than the kernel does: for mounts by root, that
//! umount(8) calls `umount.ramet`. Without the line, umount(8) knows only that the mount is a FUSE
//! mount, and does not wait for the daemon.

use std::os::unix::ffi::OsStrExt;
use std::path::Path;
use std::process::{Command, Stdio};

use rustix::process::geteuid;

use crate::mounts::RametMount;

const TABLE: &str = "/run/mount/utab";

/// Notes a mount. The mount stands without the line too.
pub fn enter(mount: &RametMount) {
    let options = ["-i", "-f", "-t", "fuse.ramet", "-o", "uhelper=ramet", "--"];
    let mut command = Command::new("mount");
    run(command.args(options).arg(&mount.volume).arg(&mount.dir));
}

/// Removes the line of a mount that was unmounted, if there is one.
pub fn leave(mount: &RametMount) {
    let table = std::fs::read(TABLE).unwrap_or_default();
    let target = [b"TARGET=", &mangled(&mount.dir)[..]].concat();
    let words = |line: &[u8]| line.split(|byte| *byte == b' ').any(|word| word == target);
    if geteuid().is_root() && table.split(|byte| *byte == b'\n').any(words) {
        let mut command = Command::new("umount");
        run(command.args(["-i", "--fake", "--"]).arg(&mount.dir));
    }
}

fn run(command: &mut Command) {
    let command = command.stdin(Stdio::null()).stdout(Stdio::null());
    let _ = command.stderr(Stdio::null()).status();
}

/// A path as the table shows it.
fn mangled(path: &Path) -> Vec<u8> {
    let mut shown = Vec::new();
    for &byte in path.as_os_str().as_bytes() {
        match byte {
            b' ' | b'\t' | b'\n' | b'\\' => {
                shown.extend_from_slice(format!("\\{byte:03o}").as_bytes());
            }
            byte => shown.push(byte),
        }
    }
    shown
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn paths_are_shown_as_libmount_shows_them() {
        let shown = mangled(Path::new("/a b\\c\n#d"));
        assert_eq!(shown, br"/a\040b\134c\012#d");
    }
}
