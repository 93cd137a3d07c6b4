//! Volumes that are not mounted, as commands name them: `VOLUME`, and `VOLUME:/PATH` for a place in it.

use std::ffi::OsStr;
use std::os::unix::ffi::OsStrExt;
use std::path::Path;
use std::sync::Arc;

use ramet_block::owner::Contents;
use ramet_block::{Access, FileDevice};
use ramet_fs::{Ino, Kind, ROOT_INO, Volume};

use crate::budget::{budget, within};
use crate::failure::{Failure, Outcome};
use crate::owner;
use crate::size::Size;

/// Image and path of a place `VOLUME:/PATH`. A directory is no volume.
pub fn place_in_volume(place: &Path) -> Option<(&Path, &OsStr)> {
    let text = place.as_os_str().as_bytes();
    let at = text.windows(2).position(|pair| pair == b":/")?;
    let (volume, inside) = (OsStr::from_bytes(&text[..at]), &text[at + 1..]);
    let volume = Path::new(volume);
    is_volume(volume).then(|| (volume, OsStr::from_bytes(inside)))
}

/// The same of `VOLUME:/PATH`, or of `VOLUME`, which means its root.
pub fn directory_in_volume(place: &Path) -> Option<(&Path, &OsStr)> {
    let root = || is_volume(place).then(|| (place, OsStr::new("/")));
    place_in_volume(place).or_else(root)
}

fn is_volume(path: &Path) -> bool {
    path.metadata().is_ok_and(|found| !found.is_dir())
}

/// The names of a path in a volume.
pub fn names_of(inside: &OsStr) -> Vec<&[u8]> {
    let names = inside.as_bytes().split(|&byte| byte == b'/');
    names.filter(|name| !name.is_empty()).collect()
}

/// Opens a volume for changes, with the memory that the option `--memory` gives.
///
/// # Errors
/// The image cannot be opened, is in use, or holds no volume.
pub fn open(image: &Path, memory: Option<Size>) -> Outcome<Arc<Volume>> {
    let device = FileDevice::open(image, Access::ReadWrite).map_err(Failure::device)?;
    let device = owner::take(image, Arc::new(device), Contents::Volume, &mut owner::tell)?;
    Volume::open(device, within(budget(memory))).map_err(|e| Failure::at(image, e))
}

/// The directory that these names lead to. It is kept as long as the volume is open.
///
/// # Errors
/// `NotFound`, `NotDirectory`, and those of the tree.
pub fn find(volume: &Volume, names: &[&[u8]]) -> ramet_fs::Result<Ino> {
    let mut at = ROOT_INO;
    for name in names {
        let found = volume.names().lookup(at, name)?;
        if found.kind != Kind::Directory {
            return Err(ramet_fs::Error::NotDirectory);
        }
        at = found.ino;
    }
    Ok(at)
}
