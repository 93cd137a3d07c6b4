//! The reason why a mount was refused, and the remedy.

use std::path::Path;

use rustix::io::Errno;
use rustix::process::geteuid;

use crate::failure::{Failure, reason};

/// The options that a container needs for FUSE.
const CONTAINER: &str = "in a container, start it with --device /dev/fuse --cap-add SYS_ADMIN";

/// The reason why the kernel or fusermount3 refused a mount, in words.
pub fn refusal(dir: &Path, error: ramet_fuse::Error) -> Failure {
    let ramet_fuse::Error::Mount { source, .. } = &error else {
        return Failure::at(dir, error);
    };
    let has_device = Path::new("/dev/fuse").exists();
    let why = why_refused(source, has_device, geteuid().is_root());
    Failure::at(dir, format!("cannot mount: {why}"))
}

fn why_refused(error: &std::io::Error, has_device: bool, is_root: bool) -> String {
    // fusermount3 tells its reason in words only.
    let is_forbidden = error.to_string().contains("not permitted");
    match Errno::from_io_error(error) {
        Some(Errno::NOENT | Errno::NODEV) if !has_device => {
            format!("/dev/fuse is missing (load the kernel's 'fuse' module; {CONTAINER})")
        }
        Some(Errno::NOENT) => "fusermount3 is missing (install the package 'fuse3')".to_owned(),
        Some(Errno::PERM | Errno::ACCESS) if is_root => format!("permission denied ({CONTAINER})"),
        None if is_root && is_forbidden => format!("permission denied ({CONTAINER})"),
        Some(Errno::PERM | Errno::ACCESS) => "permission denied (the mount point must be yours, \
             and fusermount3 from the package 'fuse3' must be installed)"
            .to_owned(),
        Some(Errno::BUSY) => "the mount point is busy".to_owned(),
        _ => reason(error),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn refusals_tell_the_options_that_a_container_needs() {
        let perm = || std::io::Error::from(Errno::PERM);
        let helper = || std::io::Error::other("fusermount3: mount failed: Operation not permitted");
        let missing = || std::io::Error::from(Errno::NOENT);
        let needs = "--device /dev/fuse --cap-add SYS_ADMIN";
        for (error, has_device, is_root) in [
            (perm(), true, true),
            (helper(), true, true),
            (missing(), false, true),
            (missing(), false, false),
        ] {
            let why = why_refused(&error, has_device, is_root);
            assert!(why.contains(needs), "{why}");
        }
        for (error, word) in [(perm(), "yours"), (missing(), "'fuse3'")] {
            let why = why_refused(&error, true, false);
            assert!(why.contains(word) && !why.contains(needs), "{why}");
        }
    }
}
