//! `ramet fsck`: checks a volume that is not mounted. Exit status as of fsck(8).

use crate::args::Fsck;
use crate::failure::{Failure, Outcome, status};
use ramet_block::{Access, FileDevice};
use ramet_fs::{OpenOptions, Volume};
use std::sync::Arc;

pub fn run(args: &Fsck) -> Outcome<u8> {
    check(args).map_err(|failure| failure.with_status(status::FSCK_OPERATIONAL))
}

fn check(args: &Fsck) -> Outcome<u8> {
    let path = &args.volume;
    let device = FileDevice::open(path, Access::ReadOnly).map_err(Failure::device)?;
    let options = OpenOptions {
        read_only: true,
        ..OpenOptions::default()
    };
    let volume = Volume::open(Arc::new(device), options).map_err(|e| Failure::at(path, e))?;
    volume.close().map_err(|e| Failure::at(path, e))?;
    Ok(0)
}
