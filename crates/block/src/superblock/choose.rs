//! The choice among the copies: a pure function, tested as a table of disk situations.

use super::format::{FORMAT_VERSION, Superblock, SuperblockError};

/// A copy of a superblock as it was read, or the fault of its place.
pub type Copy = Result<Superblock, SuperblockError>;

/// The best of one slot's copies, and the fault of its first one.
pub(super) fn best_copy(
    [first, second]: [Copy; 2],
) -> Result<(Superblock, Option<SuperblockError>), SuperblockError> {
    match (first, second) {
        // The device lost the write of the first.
        (Ok(first), Ok(second)) if first.generation < second.generation => Ok((second, None)),
        (Ok(sb), _) => Ok((sb, None)),
        (Err(error), Ok(sb)) => Ok((sb, Some(error))),
        (Err(SuperblockError::NotAVolume), Err(error)) | (Err(error), Err(_)) => Err(error),
    }
}

/// Decides which copy counts, given those of slot 0 and of slot 1, on a device of `device_bytes`.
///
/// The highest valid generation wins. A first copy that is torn yields: its writer was cut off
/// before the second. A volume is refused when a newer superblock may have been there, since the
/// older one counts space of the newer checkpoint as free. That is so with a slot without any valid
/// copy, and with a first copy that cannot be *read* while the second is the older one. One copy of
/// another format refuses the volume: an upgrade has begun, or is needed. A newest copy that
/// says that the volume is still being made refuses it too, beside copies of an older volume.
///
/// # Errors
/// [`SuperblockError`].
pub fn choose(slots: [[Copy; 2]; 2], device_bytes: u64) -> Result<Superblock, SuperblockError> {
    use SuperblockError::{
        Corrupt, Io, NewerVersion, NewestLost, NoneLeft, NotAVolume, OlderVersion, Truncated,
        Unfinished,
    };
    let all = || slots.iter().flatten();
    let known = FORMAT_VERSION;
    if let Some(error) = all().find_map(|copy| match *copy {
        Err(NewerVersion { found, .. }) => Some(NewerVersion { found, known }),
        Err(OlderVersion { found, .. }) => Some(OlderVersion { found, known }),
        _ => None,
    }) {
        return Err(error);
    }
    let newest = all().flatten().max_by_key(|sb| sb.generation);
    if newest.is_some_and(|sb| sb.is_unfinished) {
        return Err(Unfinished);
    }
    let uuids = all().flatten().map(|sb| sb.uuid);
    if uuids.clone().zip(uuids.skip(1)).any(|(a, b)| a != b) {
        let detail = "the copies belong to different volumes".into();
        return Err(Corrupt { slot: 1, detail });
    }
    let sb = match slots.map(best_copy) {
        [Ok((a, doubt_a)), Ok((b, doubt_b))] => {
            let (newer, doubt) = if a.generation > b.generation {
                (a, doubt_b)
            } else {
                (b, doubt_a)
            };
            if let Some(error @ Io(_)) = doubt {
                return Err(error);
            }
            newer
        }
        [Ok((sb, _)), Err(cause)] | [Err(cause), Ok((sb, _))] => {
            return Err(NewestLost {
                generation: sb.generation,
                cause: cause.into(),
            });
        }
        [Err(NotAVolume), Err(NotAVolume)] => return Err(NotAVolume),
        [Err(Io(error)), _] | [_, Err(Io(error))] => return Err(Io(error)),
        [Err(a), Err(b)] => return Err(NoneLeft(a.into(), b.into())),
    };
    if sb.volume_bytes > device_bytes {
        return Err(Truncated {
            volume_bytes: sb.volume_bytes,
            device_bytes,
        });
    }
    Ok(sb)
}

#[cfg(test)]
mod tests {
    use std::io;

    use super::super::format::BYTES;
    use super::super::format::tests::sample;
    use super::*;
    use crate::{Call, DeviceError};

    /// The contents of one copy.
    #[derive(Clone, Copy, Debug)]
    enum Slot {
        Good(u64),
        Torn(u64),
        Zero,
        Newer(u64),
        Older(u64),
        Foreign(u64),
        Unfinished(u64),
        Unread,
    }

    fn bytes_of(slot: Slot) -> Vec<u8> {
        match slot {
            Slot::Good(generation) => sample(generation).encode(),
            Slot::Torn(generation) => {
                let mut bytes = sample(generation).encode();
                bytes[512..].fill(0xee);
                bytes
            }
            Slot::Zero | Slot::Unread => vec![0; BYTES],
            Slot::Newer(generation) => {
                let mut sb = sample(generation);
                sb.format_version = FORMAT_VERSION + 1;
                sb.encode()
            }
            Slot::Older(generation) => {
                let mut sb = sample(generation);
                sb.format_version = FORMAT_VERSION - 1;
                sb.encode()
            }
            Slot::Unfinished(generation) => {
                let mut sb = sample(generation);
                (sb.uuid, sb.is_unfinished) = ([9; 16], true);
                sb.encode()
            }
            Slot::Foreign(generation) => {
                let mut sb = sample(generation);
                sb.uuid = [9; 16];
                sb.encode()
            }
        }
    }

    #[test]
    fn choose_is_right_in_every_disk_situation() {
        use Slot::{Foreign, Good, Newer, Older, Torn, Unfinished, Unread, Zero};
        let newer = "made by a newer version (format 11; this build knows up to 10)";
        let older = "made by an older version (format 9; this build reads only 10)";
        let unfinished = "mkfs was interrupted";
        let lost = "the newest superblock may be lost, generation";
        type Situation = ([[Slot; 2]; 2], Result<u64, &'static str>);
        let table: [Situation; 28] = [
            ([[Good(6), Good(6)], [Good(5), Good(5)]], Ok(6)),
            ([[Good(6), Good(6)], [Good(7), Good(7)]], Ok(7)),
            // Cut off while the newest was written: its first copy, or its second.
            ([[Good(6), Good(6)], [Torn(7), Good(5)]], Ok(6)),
            ([[Good(6), Good(6)], [Good(7), Torn(7)]], Ok(7)),
            ([[Good(6), Good(6)], [Good(7), Good(5)]], Ok(7)),
            // Rot.
            ([[Torn(6), Good(6)], [Good(5), Good(5)]], Ok(6)),
            ([[Zero, Good(6)], [Good(5), Zero]], Ok(6)),
            ([[Unread, Good(6)], [Good(5), Unread]], Ok(6)),
            ([[Good(4), Good(6)], [Good(5), Good(5)]], Ok(6)),
            ([[Good(6), Good(6)], [Unread, Good(7)]], Ok(7)),
            // The copy that cannot be read may be generation 7.
            (
                [[Good(6), Good(6)], [Unread, Good(5)]],
                Err("reading a superblock"),
            ),
            ([[Good(6), Good(6)], [Torn(7), Torn(7)]], Err(lost)),
            ([[Good(6), Good(6)], [Zero, Zero]], Err(lost)),
            ([[Unread, Zero], [Good(5), Good(5)]], Err(lost)),
            ([[Zero, Zero], [Zero, Zero]], Err("not a Ramet volume")),
            (
                [[Torn(6), Zero], [Zero, Zero]],
                Err("no superblock is left"),
            ),
            (
                [[Torn(6), Torn(6)], [Torn(7), Torn(7)]],
                Err("no superblock is left"),
            ),
            // A generation in the wrong slot.
            (
                [[Good(7), Good(7)], [Zero, Zero]],
                Err("no superblock is left"),
            ),
            ([[Newer(6), Good(4)], [Good(5), Good(5)]], Err(newer)),
            ([[Torn(6), Torn(6)], [Good(5), Newer(7)]], Err(newer)),
            ([[Older(6), Older(6)], [Older(5), Older(5)]], Err(older)),
            ([[Torn(6), Older(6)], [Good(5), Good(5)]], Err(older)),
            // A new volume is made over an old one, or over nothing.
            (
                [[Good(6), Good(6)], [Unfinished(7), Good(5)]],
                Err(unfinished),
            ),
            (
                [[Unfinished(8), Good(6)], [Unfinished(7), Unfinished(7)]],
                Err(unfinished),
            ),
            ([[Zero, Zero], [Unfinished(1), Zero]], Err(unfinished)),
            ([[Unfinished(8), Torn(8)], [Unread, Zero]], Err(unfinished)),
            // It is done: copies of an older state do not matter.
            ([[Good(8), Torn(6)], [Good(7), Torn(5)]], Ok(8)),
            (
                [[Good(6), Good(6)], [Foreign(7), Good(5)]],
                Err("superblock in slot 1 is corrupt: the copies belong to different"),
            ),
        ];
        for (slots, want) in table {
            let copy = |slot: usize, kind: Slot| match kind {
                Unread => {
                    let source = io::Error::other("bad sector");
                    Err(DeviceError::new(Call::Read, "a superblock", source).into())
                }
                kind => Superblock::decode(slot, &bytes_of(kind)),
            };
            let copies = [0, 1].map(|slot| slots[slot].map(|kind| copy(slot, kind)));
            match (choose(copies, 16 << 20), want) {
                (Ok(sb), Ok(generation)) => assert_eq!(sb.generation, generation, "{slots:?}"),
                (Err(error), Err(text)) => {
                    assert!(error.to_string().starts_with(text), "{slots:?}: {error}");
                }
                (got, want) => panic!("{slots:?}: {got:?} instead of {want:?}"),
            }
        }
    }
}
