//! The last bytes of the extent of a node: they say which node it is.
//!
//! The node table finds every node. When it is lost, `fsck --rebuild` finds the nodes by reading
//! the device: each trailer ends a block, has a magic, and tells the address of its own node. Its
//! checksum is seeded with a random number of the volume that is told nowhere else. So bytes of a
//! file that look like a trailer, as those of an image of a volume, are not taken for one.
//!
//! A guest lies in the extent of its carrier. The trailer of the guest ends where that of the
//! carrier begins.
//!
//! A node never changes, and ids are used again only for nodes that no checkpoint named: by an
//! opening after a crash. The trailer with the greatest number of the opening is then the right one.

use ramet_block::encoding::{Reader, Writer};
use ramet_block::{BLOCK_BYTES, Extent, checksum};
use ramet_nodetable::NodeId;

use crate::node::handle::{Kind, Place};

/// Length of a trailer, in bytes.
pub(crate) const TRAILER_BYTES: usize = 64;

const MAGIC: [u8; 4] = *b"RNOD";

/// See the module header.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Trailer {
    pub(crate) id: NodeId,
    /// Number of the opening of the volume that wrote the node.
    pub(crate) opening: u64,
    pub(crate) kind: Kind,
    pub(crate) height: u32,
    /// The place of the node; of a second copy, that of the first one.
    pub(crate) place: Place,
}

/// The part of trailers that is the same for all nodes of one opening.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct Opening {
    /// Random number of the volume.
    pub(crate) seed: u64,
    /// Number of the opening.
    pub(crate) number: u64,
}

fn sum(seed: u64, rest: &[u8]) -> u64 {
    checksum(&[&seed.to_le_bytes(), rest].concat())
}

impl Trailer {
    pub(crate) fn encode(&self, seed: u64) -> Vec<u8> {
        let mut w = Writer::with_capacity(TRAILER_BYTES);
        w.u64(0);
        w.raw(&MAGIC);
        w.u8(self.kind as u8);
        w.raw(&[0; 3]);
        w.u64(self.id.0);
        w.u64(self.opening);
        w.u64(self.place.extent.addr);
        let blocks = self.place.extent.len / BLOCK_BYTES;
        w.u32(u32::try_from(blocks).expect("a node is far below 4 GiB"));
        w.u32(self.place.used_bytes);
        w.u64(self.place.checksum);
        w.u32(self.height);
        w.u32(self.place.offset);
        let mut bytes = w.into_vec();
        let sum = sum(seed, &bytes[8..]);
        bytes[..8].copy_from_slice(&sum.to_le_bytes());
        bytes
    }

    /// The trailers at the end of `block`: that of the node that owns it, and that of its guest.
    pub(crate) fn decode_all(seed: u64, block: &[u8]) -> [Option<Self>; 2] {
        let is = |is_guest: bool| move |found: &Self| found.place.is_guest() == is_guest;
        let owner = Self::decode(seed, block).filter(is(false));
        let before = &block[..block.len().saturating_sub(TRAILER_BYTES)];
        let guest = Self::decode(seed, before).filter(is(true));
        [owner, guest]
    }

    /// The trailer at the end of `block`; `None` when there is none.
    pub(crate) fn decode(seed: u64, block: &[u8]) -> Option<Self> {
        let bytes = block.last_chunk::<TRAILER_BYTES>()?;
        if bytes[8..12] != MAGIC {
            return None;
        }
        let mut r = Reader::new(bytes);
        if r.u64().ok()? != sum(seed, &bytes[8..]) {
            return None;
        }
        r.take(MAGIC.len()).ok()?;
        let kind = match r.u8().ok()? {
            1 => Kind::Leaf,
            2 => Kind::Segment,
            3 => Kind::Skeleton,
            _ => return None,
        };
        let reserved = r.take(3).ok()?;
        let (id, opening, addr) = (r.u64().ok()?, r.u64().ok()?, r.u64().ok()?);
        let (blocks, used_bytes) = (r.u32().ok()?, r.u32().ok()?);
        let (checksum, height, offset) = (r.u64().ok()?, r.u32().ok()?, r.u32().ok()?);
        let extent = Extent::new(addr, u64::from(blocks) * BLOCK_BYTES);
        let trailers = TRAILER_BYTES as u64 * if offset == 0 { 1 } else { 2 };
        let is_sound = *reserved == [0; 3]
            && id > 0
            && (kind == Kind::Skeleton) == (height > 0)
            && (kind == Kind::Skeleton || offset == 0)
            && u64::from(offset) + u64::from(used_bytes) + trailers <= extent.len;
        is_sound.then_some(Self {
            id: NodeId(id),
            opening,
            kind,
            height,
            place: Place {
                extent,
                offset,
                used_bytes,
                checksum,
            },
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn trailer() -> Trailer {
        Trailer {
            id: NodeId(7),
            opening: 5,
            kind: Kind::Skeleton,
            height: 2,
            place: Place {
                extent: Extent::new(0x20_0000, 0x3000),
                offset: 0,
                used_bytes: 0x2f01,
                checksum: 0x1122_3344_5566_7788,
            },
        }
    }

    /// As in `docs/format.md`.
    const GOLDEN: &str = "22ed7ea5ff43d89d 524e4f4403000000 0700000000000000 \
        0500000000000000 0000200000000000 03000000012f0000 \
        8877665544332211 0200000000000000";

    #[test]
    fn bytes_of_a_trailer_are_pinned() {
        let bytes = trailer().encode(9);
        let words: Vec<String> = bytes
            .chunks(8)
            .map(|word| word.iter().map(|byte| format!("{byte:02x}")).collect())
            .collect();
        assert_eq!(words.join(" "), GOLDEN);
        assert_eq!(Trailer::decode(9, &bytes), Some(trailer()));
        let high = Trailer {
            height: u32::MAX - 1,
            ..trailer()
        };
        assert_eq!(Trailer::decode(9, &high.encode(9)), Some(high));
    }

    #[test]
    fn a_block_has_the_trailers_of_its_owner_and_of_a_guest() {
        let guest = Trailer {
            place: Place {
                offset: 0xf7,
                used_bytes: 0x2e8a,
                ..trailer().place
            },
            ..trailer()
        };
        let words: Vec<String> = guest.encode(9)[56..]
            .iter()
            .map(|byte| format!("{byte:02x}"))
            .collect();
        assert_eq!(words.concat(), "02000000f7000000");
        assert_eq!(
            Trailer::decode(9, &guest.encode(9)),
            None,
            "a byte too long"
        );
        let guest = Trailer {
            place: Place {
                used_bytes: 0x2e89,
                ..guest.place
            },
            ..guest
        };
        let owner = Trailer {
            kind: Kind::Segment,
            height: 0,
            ..trailer()
        };
        let block = |parts: &[Vec<u8>]| {
            let mut block = vec![0; BLOCK_BYTES as usize];
            let parts = parts.concat();
            let at = block.len() - parts.len();
            block[at..].copy_from_slice(&parts);
            Trailer::decode_all(9, &block)
        };
        let (first, last) = (guest.encode(9), owner.encode(9));
        assert_eq!(
            block(&[first.clone(), last.clone()]),
            [Some(owner), Some(guest)]
        );
        assert_eq!(block(&[vec![0; 64], last.clone()]), [Some(owner), None]);
        // Trailers in the place of the other one are none.
        assert_eq!(block(&[last.clone(), first]), [None, None]);
        assert_eq!(block(&[last.clone(), last]), [Some(owner), None]);
    }

    #[test]
    fn a_changed_byte_or_another_seed_makes_no_trailer() {
        let bytes = trailer().encode(9);
        assert_eq!(Trailer::decode(8, &bytes), None);
        for at in 0..bytes.len() {
            let mut bytes = bytes.clone();
            bytes[at] ^= 1;
            assert_eq!(Trailer::decode(9, &bytes), None, "{at}");
        }
        assert_eq!(Trailer::decode(9, &bytes[1..]), None);
    }
}
