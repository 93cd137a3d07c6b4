//! An ext4 beside a volume, for comparisons.

use std::fs::File;
use std::path::{Path, PathBuf};

use crate::{Bed, run_ok};

/// An ext4 with access control lists in a file, mounted until it is dropped. Only root has one.
pub struct Ext4 {
    dir: PathBuf,
}

impl Ext4 {
    /// Makes and mounts one of 64 MiB in the folder of `bed`.
    ///
    /// # Panics
    /// If this process is not root.
    pub fn new(bed: &Bed) -> Ext4 {
        let (image, dir) = (bed.path().join("ext4.img"), bed.path().join("ext4"));
        std::fs::create_dir(&dir).expect("the folder is new");
        File::create(&image)
            .and_then(|file| file.set_len(64 << 20))
            .expect("there is room");
        run_ok("mkfs.ext4", &["-q".as_ref(), image.as_os_str()]);
        let args = ["-o".as_ref(), "loop,acl".as_ref(), &*image, &*dir];
        run_ok("mount", &args);
        Ext4 { dir }
    }

    /// Its root directory.
    pub fn root(&self) -> &Path {
        &self.dir
    }
}

impl Drop for Ext4 {
    fn drop(&mut self) {
        run_ok("umount", &[&self.dir]);
    }
}
