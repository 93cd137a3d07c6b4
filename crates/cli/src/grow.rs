//! `ramet grow`: makes a volume larger, mounted or not. Its contents stay in place.

use std::fs::{self, File};
use std::io::{Seek, SeekFrom};
use std::os::unix::fs::FileTypeExt;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use ramet_block::owner::Contents;
use ramet_block::{Access, BLOCK_BYTES, FileDevice, OpenError};
use ramet_fs::Volume;
use rustix::io::Errno;

use crate::args::Grow;
use crate::beside::Live;
use crate::budget::{budget, within};
use crate::control::{Root, mounted, refuse_if_read_only};
use crate::failure::{Failure, Outcome};
use crate::home::refuse_before_init;
use crate::mounts;
use crate::output::say;
use crate::owner;
use crate::size::Size;
use crate::volume_root::root_of;

pub fn run(args: &Grow) -> Outcome {
    let target = &args.target;
    refuse_before_init(target)?;
    let meta = fs::metadata(target).map_err(|e| Failure::system(target, e))?;
    if meta.is_dir() {
        return grow_mounted(target, args.size);
    }
    match FileDevice::open(target, Access::ReadWrite) {
        Ok(device) => grow_unmounted(args, device),
        Err(busy @ OpenError::Busy { .. }) => match Live::of(target)? {
            Some(live) => grow_mounted(&live.dir, args.size),
            None => Err(Failure::device(busy)),
        },
        Err(e) => Err(Failure::device(e)),
    }
}

fn grow_mounted(dir: &Path, size: Option<Size>) -> Outcome {
    let root = Root::open_dir(dir).map_err(|e| Failure::system(dir, e))?;
    let before = root.daemon().map_err(|e| mounted(dir, e))?.device_bytes;
    refuse_if_read_only(&root, dir)?;
    let bytes = match size {
        Some(size) => size.bytes(),
        None => whole(&volume_of(dir, &root)?)?,
    };
    let bytes = wanted(dir, before, bytes)?;
    root_of(&root, dir)?.grow(bytes).map_err(|e| match e {
        Errno::PERM => Failure::at(
            dir,
            "only root and the user who mounted the volume may grow it",
        ),
        e => mounted(dir, e),
    })?;
    tell(dir, before, bytes)
}

fn grow_unmounted(args: &Grow, device: FileDevice) -> Outcome {
    let volume = args.target.as_path();
    let bytes = match args.size {
        Some(size) => size.bytes(),
        None => whole(volume)?,
    };
    let failed = |e| Failure::at(volume, e);
    let device = owner::take(volume, Arc::new(device), Contents::Volume, &mut owner::tell)?;
    let open = Volume::open(device, within(budget(args.memory))).map_err(failed)?;
    let before = open.stats().tree.device_bytes;
    let grown = wanted(volume, before, bytes)
        .and_then(|bytes| open.grow(bytes).map(|()| bytes).map_err(failed));
    open.close().map_err(failed)?;
    tell(volume, before, grown?)
}

/// The volume that is mounted at `root`, whose size counts.
fn volume_of(dir: &Path, root: &Root) -> Outcome<PathBuf> {
    let device = root.device().map_err(|e| Failure::system(dir, e))?;
    let mount = mounts::list()?.into_iter().find(|mount| {
        Root::open_dir(&mount.dir)
            .and_then(|root| root.device())
            .is_ok_and(|found| found == device)
    });
    let unknown = || Failure::at(dir, "its volume is not known here: give --size N");
    mount.map(|mount| mount.volume).ok_or_else(unknown)
}

/// Size of a block device, in bytes.
fn whole(volume: &Path) -> Outcome<u64> {
    let failed = |e| Failure::system(volume, e);
    let kind = fs::metadata(volume).map_err(failed)?.file_type();
    if !kind.is_block_device() {
        return Err(Failure::at(volume, "is an image file: give --size N"));
    }
    let mut file = File::open(volume).map_err(failed)?;
    file.seek(SeekFrom::End(0)).map_err(failed)
}

/// `bytes` in whole blocks, if the volume is not larger.
fn wanted(target: &Path, before: u64, bytes: u64) -> Outcome<u64> {
    let bytes = bytes / BLOCK_BYTES * BLOCK_BYTES;
    if bytes < before {
        let why = format!(
            "is a volume of {}, and volumes do not shrink",
            Size::new(before)
        );
        return Err(Failure::at(target, why));
    }
    Ok(bytes)
}

fn tell(target: &Path, before: u64, after: u64) -> Outcome {
    say!(
        "{}: a volume of {}, was {}",
        target.display(),
        Size::new(after),
        Size::new(before)
    )
}
