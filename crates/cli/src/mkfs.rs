//! `ramet mkfs`: makes an empty volume, and never over other data by mistake.

use std::fs::{self, File};
use std::io::{self, Read, Seek, SeekFrom};
use std::os::unix::fs::FileTypeExt;
use std::path::Path;
use std::sync::Arc;

use ramet_betree::VOLUME_BYTES_MIN;
use ramet_block::owner::{Contents, OwnerBlock, is_place};
use ramet_block::superblock::read_superblock;
use ramet_block::{
    Access, BLOCK_BYTES, Device, FileDevice, OpenError, SuperblockError, Uuid, create_image,
};
use ramet_fs::{FormatOptions, UnfinishedVolume};

use crate::args::Mkfs;
use crate::failure::{Failure, Outcome};
use crate::output::{self, say};
use crate::progress::Progress;
use crate::size::Size;
use crate::{host, owner};

/// Bytes at each end of a block device that are searched for data: every partition table, boot
/// sector, RAID label and superblock in use lies there.
const END_BYTES: u64 = 1 << 20;

pub fn run(args: &Mkfs) -> Outcome {
    let path = &args.volume;
    let kind = match fs::metadata(path) {
        Ok(found) => Some(found.file_type()),
        Err(e) if e.kind() == io::ErrorKind::NotFound => None,
        Err(e) => return Err(Failure::system(path, e)),
    };
    let size = args
        .size
        .map(|size| size.bytes().next_multiple_of(BLOCK_BYTES));
    if size.is_some_and(|bytes| bytes < VOLUME_BYTES_MIN) {
        return Err(too_small(path));
    }
    let device = match (kind, size) {
        (None, None) => {
            return Err(Failure::at(
                path,
                "does not exist: give --size N to create it",
            ));
        }
        (None, Some(bytes)) => {
            if args.dry_run {
                return tell(args, bytes);
            }
            create_image(path, bytes).map_err(Failure::device)?
        }
        (Some(kind), Some(_)) if kind.is_block_device() => {
            return Err(Failure::at(
                path,
                "a block device is used whole: leave --size out",
            ));
        }
        (Some(kind), size) => {
            let device = FileDevice::open(path, Access::ReadWrite).map_err(Failure::device)?;
            if !args.force {
                refuse_data(path, &device, kind.is_block_device())?;
            }
            if args.dry_run {
                return tell(args, size.unwrap_or(device.len_bytes()));
            }
            device
        }
    };
    let fresh = kind.is_none();
    let made = make(args, device, fresh);
    if made.is_err() && fresh {
        // The new image held no data of the user.
        let _ = fs::remove_file(path);
    }
    made
}

fn too_small(path: &Path) -> Failure {
    Failure::at(path, "a volume takes at least 4 MiB")
}

fn make(args: &Mkfs, image: FileDevice, fresh: bool) -> Outcome {
    let path = &args.volume;
    let failed = |e| Failure::system(path, e);
    let image = Arc::new(image);
    let resize = || match args.size {
        Some(size) => image.resize_anew(size.bytes().next_multiple_of(BLOCK_BYTES)),
        None => Ok(()),
    };
    // The image is too short for a volume, so there is no volume to be careful with.
    if image.len_bytes() < VOLUME_BYTES_MIN {
        resize().map_err(failed)?;
    }
    if image.len_bytes() < VOLUME_BYTES_MIN {
        return Err(too_small(path));
    }
    // The claim comes before the first change: a volume that another machine has mounted must
    // survive a mistaken `--force`.
    let device: Arc<dyn Device> =
        owner::take(path, image.clone(), Contents::Anything, &mut owner::tell)?;
    let uuid = match args.uuid {
        Some(uuid) => uuid,
        None => Uuid::random().map_err(failed)?,
    };
    let options = FormatOptions {
        uuid: uuid.0,
        label: args.label.clone().unwrap_or_default(),
        owner: (
            rustix::process::geteuid().as_raw(),
            rustix::process::getegid().as_raw(),
        ),
        compression: Some(args.compression),
        node_seed: Uuid::random().map_err(failed)?.low(),
        metadata_copies: args.metadata_copies,
        ..FormatOptions::default()
    };
    let refused = |e| Failure::at(path, e);
    // From here on a kill leaves no volume that opens, but the new one.
    let volume = UnfinishedVolume::begin(&device, &options).map_err(refused)?;
    if !fresh {
        resize().map_err(failed)?;
    }
    let mut progress = Progress::new("discarding");
    volume
        .erase(&mut |done, total| progress.set(done, total))
        .map_err(refused)?;
    drop(progress);
    volume.finish().map_err(refused)?;
    if let Some(shortage) = host::shortage(path, device.as_ref()) {
        output::complain(shortage);
    }
    tell(args, device.len_bytes())
}

/// Tells the user about the volume that was made, or would be.
fn tell(args: &Mkfs, size_bytes: u64) -> Outcome {
    if !args.quiet {
        let would = if args.dry_run { "would be " } else { "" };
        let size = Size::new(size_bytes);
        say!("{}: {would}a volume of {size}", args.volume.display())?;
    }
    Ok(())
}

/// Whether an image file holds no volume and no data, as the making of one leaves it that was
/// interrupted. A file that another process has open is none.
pub fn is_left_unmade(path: &Path) -> Outcome<bool> {
    let found = fs::metadata(path).map_err(|e| Failure::system(path, e))?;
    if !found.is_file() {
        return Ok(false);
    }
    let device = match FileDevice::open(path, Access::ReadOnly) {
        Ok(device) => device,
        Err(OpenError::Busy { .. }) => return Ok(false),
        Err(e) => return Err(Failure::device(e)),
    };
    match read_superblock(&device) {
        Err(SuperblockError::NotAVolume) => file_holds_data(path)
            .map(|holds_data| !holds_data)
            .map_err(|e| Failure::system(path, e)),
        Err(SuperblockError::Unfinished) => Ok(true),
        Err(SuperblockError::Io(e)) => Err(Failure::at(path, e)),
        Ok(_) | Err(_) => Ok(false),
    }
}

/// Fails when `device` holds data that the user may want to keep.
fn refuse_data(path: &Path, device: &FileDevice, block_device: bool) -> Outcome {
    match read_superblock(device) {
        Err(SuperblockError::NotAVolume) => {}
        // Its contents were given up already.
        Err(SuperblockError::Unfinished) => return Ok(()),
        Err(SuperblockError::Io(e)) => return Err(Failure::at(path, e)),
        // A damaged volume, or one of a newer version, is a volume too.
        Ok(_) | Err(_) => {
            return Err(Failure::at(
                path,
                "holds a Ramet volume: --force makes a new one over it",
            ));
        }
    }
    let data = if block_device {
        ends_hold_data(device)
    } else {
        file_holds_data(path)
    };
    match data {
        Ok(false) => Ok(()),
        Ok(true) => Err(Failure::at(path, "holds other data: --force overwrites it")),
        Err(e) => Err(Failure::system(path, e)),
    }
}

fn ends_hold_data(device: &FileDevice) -> io::Result<bool> {
    let total = device.len_bytes();
    let len = END_BYTES.min(total);
    let mut piece = vec![0; len as usize];
    for at in [0, total - len] {
        device.read_at(at, &mut piece)?;
        if is_data(at, &piece) {
            return Ok(true);
        }
    }
    Ok(false)
}

/// Whether the bytes at this address have one that is not zero, outside of owner blocks: a making
/// that is interrupted leaves these.
fn is_data(addr: u64, bytes: &[u8]) -> bool {
    let blocks = bytes.chunks(BLOCK_BYTES as usize);
    let mut blocks = (addr..).step_by(BLOCK_BYTES as usize).zip(blocks);
    blocks.any(|(addr, block)| {
        let is_owner_block = || is_place(addr) && OwnerBlock::decode(block).is_ok();
        block.iter().any(|&b| b != 0) && !is_owner_block()
    })
}

/// Whether a file holds data; holes are skipped.
fn file_holds_data(path: &Path) -> io::Result<bool> {
    let mut file = File::open(path)?;
    let total = file.metadata()?.len();
    let mut progress = Progress::new("looking for data");
    let mut piece = vec![0; 1 << 20];
    let mut at = 0;
    while at < total {
        match rustix::fs::seek(&file, rustix::fs::SeekFrom::Data(at)) {
            Ok(data) => at = data,
            Err(rustix::io::Errno::NXIO) => return Ok(false),
            // The file system has no holes: every byte is data.
            Err(_) => {
                file.seek(SeekFrom::Start(at))?;
            }
        }
        let n = file.read(&mut piece)?;
        if n == 0 {
            break;
        }
        if is_data(at, &piece[..n]) {
            return Ok(true);
        }
        at += n as u64;
        progress.set(at, total);
    }
    Ok(false)
}

#[cfg(test)]
mod tests {
    use super::*;
    use ramet_block::owner::{CLAIMS, Owner};
    use std::os::unix::fs::FileExt;

    #[test]
    fn one_byte_far_inside_a_sparse_file_is_data() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("file");
        let file = File::create(&path).unwrap();
        assert!(!file_holds_data(&path).unwrap());
        file.set_len(1 << 30).unwrap();
        file.write_all_at(&[0; 70_000], 5 << 20).unwrap();
        assert!(!file_holds_data(&path).unwrap());
        file.write_all_at(b"x", 700 << 20).unwrap();
        assert!(file_holds_data(&path).unwrap());
    }

    #[test]
    fn a_claim_is_no_data_and_the_same_bytes_elsewhere_are() {
        let claim = OwnerBlock::Claim(Owner::default()).encode();
        let mut torn = claim.clone();
        torn[100] ^= 1;
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("file");
        for (addr, bytes, is_data) in [
            (CLAIMS[1], &claim, false),
            (CLAIMS[1], &torn, true),
            (CLAIMS[1] + BLOCK_BYTES / 2, &claim, true),
            (1 << 20, &claim, true),
        ] {
            let file = File::create(&path).unwrap();
            file.set_len(8 << 20).unwrap();
            file.write_all_at(bytes, addr).unwrap();
            assert_eq!(file_holds_data(&path).unwrap(), is_data, "{addr}");
        }
    }
}
