//! The root of a mounted volume.
//!
//! A call about the whole volume goes to its root, and so does one that names objects by their paths
//! from there: the daemon does not hear through which mount a call comes, and a bind mount of a part
//! of the volume must not lead out of that part.

use std::path::Path;

use ramet_fs::ROOT_INO;
use ramet_fuse::mountinfo;
use rustix::fs::fstat;

use crate::control::{Root, mounted};
use crate::failure::{Failure, Outcome};

/// The root of the volume that the open directory `dir` is of. `shown` is the path of that directory.
///
/// # Errors
/// `dir` is on no Ramet mount, or this process sees no mount of the whole volume.
pub fn root_of(dir: &Root, shown: &Path) -> Outcome<Root> {
    let failed = |e| mounted(shown, e);
    // Asks first: the numbers of other file systems say something else.
    dir.stats_json().map_err(failed)?;
    let here = fstat(&dir.0).map_err(failed)?;
    if here.st_ino == ROOT_INO.0 {
        return dir.again().map_err(failed);
    }
    let is_root = |root: &Root| {
        fstat(&root.0).is_ok_and(|seen| (seen.st_dev, seen.st_ino) == (here.st_dev, ROOT_INO.0))
    };
    let mounts = mountinfo::mounts().map_err(|e| Failure::system(shown, e))?;
    let of_whole = mounts
        .iter()
        .filter(|mount| mount.device.is(here.st_dev) && mount.root == Path::new("/"));
    // Another mount may lie on one of them.
    let mut roots = of_whole.filter_map(|mount| Root::open_dir(&mount.dir).ok());
    roots.find(is_root).ok_or_else(|| {
        let why = "only a part of its volume is seen here: the command needs the directory on which \
                   the whole volume is mounted";
        Failure::at(shown, why)
    })
}
