//! The copies of a device: reading, writing and repairing them.

use std::io;

use super::choose::{Copy, best_copy, choose};
use super::format::{BYTES, SLOTS, Superblock, SuperblockError};
use crate::device::Device;
use crate::device_error::{Call, DeviceError};
use crate::failpoints::{self, Fault};

/// More openings than a lost superblock can have counted beyond the one that is left.
const OPENINGS_LOST: u64 = 1 << 16;

const SUPERBLOCK: &str = "a superblock";

/// Reads all copies, those of slot 0 first. On a device that is too short for a copy, the copy
/// counts as never written.
pub fn read_copies(device: &dyn Device) -> [[Copy; 2]; 2] {
    let read = |slot: usize, copy: usize| {
        let mut bytes = vec![0; BYTES];
        match device.read_at(SLOTS[slot][copy], &mut bytes) {
            Ok(()) => Superblock::decode(slot, &bytes),
            Err(error) if error.kind() == io::ErrorKind::UnexpectedEof => {
                Err(SuperblockError::NotAVolume)
            }
            Err(error) => {
                let addr = SLOTS[slot][copy];
                Err(DeviceError::at(Call::Read, SUPERBLOCK, addr)(error).into())
            }
        }
    };
    [[read(0, 0), read(0, 1)], [read(1, 0), read(1, 1)]]
}

/// Reads all copies and chooses.
///
/// # Errors
/// [`SuperblockError`].
pub fn read_superblock(device: &dyn Device) -> Result<Superblock, SuperblockError> {
    choose(read_copies(device), device.len_bytes())
}

/// Whether a copy that [`read_superblock`] sees is another one on the medium, where another machine
/// may have written it: the caches of this machine are old then. Reads past them.
pub(crate) fn are_copies_outdated(device: &dyn Device) -> bool {
    let is_outdated = |addr: &u64| {
        let [mut seen, mut fresh] = [vec![0; BYTES], vec![0; BYTES]];
        let read = device.read_at(*addr, &mut seen);
        let read = read.and_then(|()| device.read_fresh(*addr, &mut fresh));
        read.is_ok() && seen != fresh
    };
    SLOTS.iter().flatten().any(is_outdated)
}

/// Goes back to the superblock that is left when the other slot is lost, for good. Later changes
/// are lost, and the space that they took may hold their bytes. Durable on return.
///
/// # Errors
/// [`SuperblockError::Io`], and the errors of [`choose`] but `NewestLost`.
pub fn go_back(device: &dyn Device) -> Result<Superblock, SuperblockError> {
    let left = match read_superblock(device) {
        Err(SuperblockError::NewestLost { .. }) => read_copies(device)
            .into_iter()
            .find_map(|slot| best_copy(slot).ok()),
        chosen => return chosen,
    };
    let (mut sb, _) = left.ok_or(SuperblockError::NotAVolume)?;
    // Openings that are not known any more have had other numbers, and other epochs: the next epoch
    // is no smaller than the number of its opening.
    sb.openings = sb.openings.max(sb.epoch).saturating_add(OPENINGS_LOST);
    // The lost slot first: as long as it has no superblock, the loss is told. The one that is left is
    // written over only when the other slot has the new numbers.
    for _ in 0..2 {
        sb.generation += 1;
        write_superblock(device, &sb)?;
    }
    let synced = device.sync();
    synced.map_err(|e| DeviceError::new(Call::Sync, SUPERBLOCK, e))?;
    Ok(sb)
}

/// A copy that is not as it should be.
#[derive(Debug)]
pub struct BadCopy {
    /// Where it lies, in bytes.
    pub addr: u64,
    /// Its fault, in words.
    pub detail: String,
    /// A power cut may have left the copy like this: it is no damage.
    pub may_be_cut_off: bool,
    /// It was written again and reads back.
    pub is_repaired: bool,
}

/// Reads all copies again, on a volume whose durable superblock is `newest`, and returns those that
/// are bad. Nobody may write superblocks meanwhile.
pub fn bad_copies(device: &dyn Device, newest: &Superblock) -> Vec<BadCopy> {
    let bad = judge_copies(device, newest).into_iter();
    bad.map(|(copy, _)| copy).collect()
}

/// The same, and writes the bad copies anew unless `read_only`: a copy of the newest from memory,
/// one of the other slot from its twin, or as one more copy of the newest.
///
/// # Errors
/// The answer of the device to a repair.
pub fn scrub_copies(
    device: &dyn Device,
    newest: &Superblock,
    read_only: bool,
) -> io::Result<Vec<BadCopy>> {
    let mut found = Vec::new();
    for (mut bad, right) in judge_copies(device, newest) {
        if !read_only {
            // The copies that are good must be durable before one is written.
            if !failpoints::is_on(Fault::OpenWithoutSync) {
                device.sync()?;
            }
            device.write_at(bad.addr, &right.encode())?;
            device.sync()?;
            let mut bytes = vec![0; BYTES];
            device.read_at(bad.addr, &mut bytes)?;
            bad.is_repaired = Superblock::decode(right.slot(), &bytes).is_ok_and(|sb| sb == right);
        }
        found.push(bad);
    }
    Ok(found)
}

/// The bad copies, each with the superblock that belongs there.
fn judge_copies(device: &dyn Device, newest: &Superblock) -> Vec<(BadCopy, Superblock)> {
    let is_older = |sb: &Superblock| sb.uuid == newest.uuid && sb.generation < newest.generation;
    let mut found = Vec::new();
    for (slot, pair) in read_copies(device).iter().enumerate() {
        let is_newest = slot == newest.slot();
        let is_good = |copy: &Copy| {
            copy.as_ref().is_ok_and(|sb| {
                if is_newest {
                    sb == newest
                } else {
                    is_older(sb)
                }
            })
        };
        let twin = pair.iter().find(|copy| is_good(copy));
        let mut right = newest.clone();
        if let Some(Ok(twin)) = twin {
            right = twin.clone();
        } else if !is_newest {
            right.generation = newest.generation.saturating_sub(1);
        }
        for (at, copy) in pair.iter().enumerate() {
            if is_good(copy) {
                continue;
            }
            // The last write was that of the second copy of the newest, for which a close does not
            // wait, or that of a newer one to the first copy of the other slot.
            let may_be_cut_off = match copy {
                Ok(sb) => is_newest && at == 1 && is_older(sb),
                Err(SuperblockError::Corrupt { .. }) => is_newest == (at == 1),
                Err(_) => false,
            };
            let detail = match copy {
                Ok(sb) => format!("generation {} of {:02x?}", sb.generation, sb.uuid),
                Err(SuperblockError::NotAVolume) => "no magic bytes".into(),
                Err(error) => error.to_string(),
            };
            let bad = BadCopy {
                addr: SLOTS[slot][at],
                detail,
                may_be_cut_off,
                is_repaired: false,
            };
            found.push((bad, right.clone()));
        }
    }
    found
}

/// Writes `sb` to its slot. It counts, durably, on return; its second copy is durable with the
/// next sync. The caller has synced the nodes and pages that `sb` names.
///
/// # Errors
/// [`SuperblockError::Io`]; it is then unknown which superblock counts.
pub fn write_superblock(device: &dyn Device, sb: &Superblock) -> Result<(), SuperblockError> {
    let [first, second] = SLOTS[sb.slot()];
    let bytes = sb.encode();
    let write = |addr| {
        let written = device.write_at(addr, &bytes);
        written.map_err(DeviceError::at(Call::Write, SUPERBLOCK, addr))
    };
    write(first)?;
    if !failpoints::is_on(Fault::SuperblockUnsynced) {
        let synced = device.sync();
        synced.map_err(|e| DeviceError::new(Call::Sync, SUPERBLOCK, e))?;
    }
    Ok(write(second)?)
}

#[cfg(test)]
mod tests {
    use super::super::format::AREA_END;
    use super::super::format::tests::sample;
    use super::*;
    use crate::MemDevice;

    #[test]
    fn a_write_cut_at_any_byte_leaves_the_old_or_the_new() {
        let device = MemDevice::new(16 << 20);
        for generation in 4..7 {
            write_superblock(&device, &sample(generation)).unwrap();
        }
        let (old, new) = (sample(5).encode(), sample(7).encode());
        let differ = old.iter().zip(&new).rposition(|(a, b)| a != b);
        let whole = differ.unwrap() + 1;
        for place in SLOTS[1] {
            for cut in 0..=BYTES {
                device
                    .write_at(place, &[&new[..cut], &old[cut..]].concat())
                    .unwrap();
                let is_new = cut >= whole || place != SLOTS[1][0];
                let expected = if is_new { 7 } else { 6 };
                let got = read_superblock(&device).unwrap();
                assert_eq!(got.generation, expected, "cut at {cut}");
            }
        }
    }

    #[test]
    fn any_one_block_of_the_area_may_rot() {
        let device = MemDevice::new(16 << 20);
        write_superblock(&device, &sample(5)).unwrap();
        write_superblock(&device, &sample(6)).unwrap();
        for addr in (0..AREA_END).step_by(BYTES) {
            let mut kept = vec![0; BYTES];
            device.read_at(addr, &mut kept).unwrap();
            for byte in [0, 0xff] {
                device.write_at(addr, &[byte; BYTES]).unwrap();
                assert_eq!(read_superblock(&device).unwrap().generation, 6, "{addr}");
            }
            device.write_at(addr, &kept).unwrap();
        }
        for half in [0, AREA_END / 2] {
            let spoilt = MemDevice::new(16 << 20);
            write_superblock(&spoilt, &sample(5)).unwrap();
            write_superblock(&spoilt, &sample(6)).unwrap();
            spoilt
                .write_at(half, &[0xaa; (AREA_END / 2) as usize])
                .unwrap();
            assert_eq!(read_superblock(&spoilt).unwrap().generation, 6);
        }
    }

    #[test]
    fn going_back_takes_the_slot_that_is_left() {
        let device = MemDevice::new(16 << 20);
        write_superblock(&device, &sample(5)).unwrap();
        write_superblock(&device, &sample(6)).unwrap();
        for addr in SLOTS[0] {
            device.write_at(addr, &[0xaa; BYTES]).unwrap();
        }
        let lost = read_superblock(&device).unwrap_err();
        assert!(
            matches!(lost, SuperblockError::NewestLost { generation: 5, .. }),
            "{lost}"
        );
        assert_eq!(go_back(&device).unwrap().generation, 7);
        let expected = |generation| Superblock {
            openings: sample(5).openings + OPENINGS_LOST,
            generation,
            ..sample(5)
        };
        assert_eq!(read_superblock(&device).unwrap(), expected(7));
        for (slot, generation) in [(0, 6), (1, 7)] {
            for copy in &read_copies(&device)[slot] {
                assert_eq!(*copy.as_ref().unwrap(), expected(generation));
            }
        }
    }

    /// The copies that a check tells, by slot and place, of a device that is changed by `spoil`.
    fn told(clean: bool, spoil: impl FnOnce(&MemDevice)) -> Vec<(u64, bool)> {
        let device = MemDevice::new(16 << 20);
        let newest = Superblock { clean, ..sample(6) };
        write_superblock(&device, &sample(5)).unwrap();
        write_superblock(&device, &newest).unwrap();
        assert!(bad_copies(&device, &newest).is_empty());
        spoil(&device);
        let bad = bad_copies(&device, &read_superblock(&device).unwrap());
        bad.iter()
            .map(|copy| (copy.addr, copy.may_be_cut_off))
            .collect()
    }

    #[test]
    fn copy_that_a_power_cut_leaves_is_told_from_damage() {
        let [newest, other] = SLOTS;
        for clean in [false, true] {
            // A power cut leaves no zeros, and no more than one copy that is torn.
            for addr in SLOTS.into_iter().flatten() {
                let zeros = |device: &MemDevice| device.write_at(addr, &[0; BYTES]).unwrap();
                assert_eq!(told(clean, zeros), [(addr, false)]);
                let torn = |device: &MemDevice| device.write_at(addr + 3000, &[7; 512]).unwrap();
                let is_last = [newest[1], other[0]].contains(&addr);
                assert_eq!(told(clean, torn), [(addr, is_last)]);
            }
            // The write of the last copy is lost.
            let lost = |device: &MemDevice| {
                device.write_at(newest[1], &sample(4).encode()).unwrap();
            };
            assert_eq!(told(clean, lost), [(newest[1], true)]);
            let lost = |device: &MemDevice| {
                device.write_at(newest[0], &sample(4).encode()).unwrap();
            };
            assert_eq!(told(clean, lost), [(newest[0], false)]);
        }
    }

    #[test]
    fn a_truncated_image_is_told() {
        let device = MemDevice::new(8 << 20);
        write_superblock(&device, &sample(5)).unwrap();
        write_superblock(&device, &sample(6)).unwrap();
        assert_eq!(
            read_superblock(&device).unwrap_err().to_string(),
            "image is truncated: superblock says 16777216 bytes, file has 8388608"
        );
    }

    #[test]
    fn generations_alternate_between_the_slots() {
        let device = MemDevice::new(16 << 20);
        write_superblock(&device, &sample(1)).unwrap();
        for generation in 2..6 {
            write_superblock(&device, &sample(generation)).unwrap();
            assert_eq!(read_superblock(&device).unwrap().generation, generation);
        }
    }

    #[test]
    fn something_short_is_not_a_volume() {
        for len in [0, 512, 4096, 70_000] {
            let got = read_superblock(&MemDevice::new(len));
            assert!(
                matches!(got, Err(SuperblockError::NotAVolume)),
                "{len} bytes: {got:?}"
            );
        }
    }
}
