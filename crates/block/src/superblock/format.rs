//! The bytes of one copy: fields, flags, label, checksum.

use thiserror::Error;

use crate::codec::{Codec, ZstdLevel};
use crate::device_error::DeviceError;
use crate::encoding::{DecodeError, Reader, Writer};
use crate::identity::Label;
use crate::{BLOCK_BYTES, Extent, PageRef, checksum};

/// Version of the format that this build reads and writes.
pub const FORMAT_VERSION: u32 = 10;

/// Addresses of the copies of the two slots, in bytes.
pub const SLOTS: [[u64; 2]; 2] = [[0, 98_304], [65_536, 32_768]];

/// First byte behind the superblock area. Behind each copy are two owner blocks (`owner/mod.rs`);
/// the rest of the area is reserved.
pub const AREA_END: u64 = 131_072;

const MAGIC: [u8; 8] = *b"RAMETvol";
pub(super) const BYTES: usize = BLOCK_BYTES as usize;
const CHECKSUM_AT: usize = BYTES - 8;
/// Reserved bytes behind the roots of the two tables.
const RESERVED_BYTES: usize = 24;
const LABEL_AT: usize = 200;
const NODES_AT: usize = LABEL_AT + Label::BYTES_MAX;
const FIELDS_END: usize = NODES_AT + 16;
const FLAG_CLEAN: u32 = 1;
const FLAG_SPACE_DEBT: u32 = 2;
const FLAG_UNFINISHED: u32 = 4;

const _: () = assert!(FIELDS_END <= CHECKSUM_AT);
const _: () = assert!(SLOTS[0][1] + BLOCK_BYTES <= AREA_END);

/// Where the journal begins to matter.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct JournalPos {
    /// Logical byte offset, which grows for ever; the place is this modulo the journal's length.
    pub offset: u64,
    /// Number that the frame at that offset carries.
    pub frame: u64,
}

/// One checkpoint of the volume and the parameters it was made with.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Superblock {
    /// Identity of the volume.
    pub uuid: [u8; 16],
    /// Version of the format; this build writes [`FORMAT_VERSION`].
    pub format_version: u32,
    /// Number of this superblock; it grows by one with each one written.
    pub generation: u64,
    /// Number of read-write mounts so far. Journal frames carry it.
    pub epoch: u64,
    /// Size of the volume in bytes; the device is at least this long.
    pub volume_bytes: u64,
    /// The preallocated journal.
    pub journal: Extent,
    /// First journal frame that is not in this checkpoint.
    pub journal_start: JournalPos,
    /// Root page of the node table.
    pub node_table: PageRef,
    /// Root page of the free-space map.
    pub space_map: PageRef,
    /// Root node of the tree; 0 for none.
    pub root_node: u64,
    /// Smallest node number never used.
    pub next_node: u64,
    /// Smallest sequence number never used.
    pub next_seq: u64,
    /// Target size of a leaf in bytes.
    pub leaf_bytes: u32,
    /// Target size of a basement node in bytes, before compression.
    pub basement_bytes: u32,
    /// Most children of a skeleton.
    pub fanout: u16,
    /// Compression of new blocks.
    pub codec: Codec,
    /// Whether the volume was unmounted, so that the journal holds nothing to replay.
    pub clean: bool,
    /// Whether steps were left out for want of room, and are still to be made up for.
    pub space_debt: bool,
    /// Whether the volume is still being made: its contents mean nothing yet.
    pub is_unfinished: bool,
    /// How often pages of the node table and the maps, and the root node, are kept.
    pub metadata_copies: MetadataCopies,
    /// Name that people gave to the volume.
    pub label: Label,
    /// Random number that the checksums of trailers of nodes are seeded with; told nowhere else.
    pub node_seed: u64,
    /// Number of the last opening that may have written nodes.
    pub openings: u64,
}

/// How often metadata that everything else depends on is kept. The number is that of the disk.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
#[repr(u8)]
pub enum MetadataCopies {
    /// One bad block may take the volume.
    One = 1,
    /// Two copies, far apart: one bad block takes nothing.
    #[default]
    Two = 2,
}

impl MetadataCopies {
    /// The choice that a number stands for.
    #[must_use]
    pub const fn from_count(count: u8) -> Option<Self> {
        match count {
            1 => Some(Self::One),
            2 => Some(Self::Two),
            _ => None,
        }
    }

    /// The number of copies.
    #[must_use]
    pub const fn count(self) -> u8 {
        self as u8
    }
}

/// Reason why no superblock counts.
#[derive(Debug, Error)]
pub enum SuperblockError {
    /// Neither slot carries the magic bytes.
    #[error("not a Ramet volume")]
    NotAVolume,
    /// A valid superblock of a version that this build does not know.
    #[error("made by a newer version (format {found}; this build knows up to {known})")]
    NewerVersion {
        /// Version found.
        found: u32,
        /// Newest version known here.
        known: u32,
    },
    /// A valid superblock of a version that this build reads no more.
    #[error(
        "made by an older version (format {found}; this build reads only {known}): copy the files with the ramet that made it"
    )]
    OlderVersion {
        /// Version found.
        found: u32,
        /// Version read here.
        known: u32,
    },
    /// The making of a volume began here and did not end.
    #[error(
        "mkfs was interrupted here, so there is no volume yet, and no older one any more: run mkfs again"
    )]
    Unfinished,
    /// The device is shorter than the volume.
    #[error("image is truncated: superblock says {volume_bytes} bytes, file has {device_bytes}")]
    Truncated {
        /// Bytes according to the superblock.
        volume_bytes: u64,
        /// Bytes that the device has.
        device_bytes: u64,
    },
    /// The bytes of a slot do not form a superblock.
    #[error("superblock in slot {slot} is corrupt: {detail}")]
    Corrupt {
        /// 0 or 1.
        slot: usize,
        /// The fault, in words.
        detail: String,
    },
    /// Some copy carries the magic bytes, and none is valid.
    #[error("no superblock is left: {0}; {1}")]
    NoneLeft(Box<SuperblockError>, Box<SuperblockError>),
    /// Both copies of a slot are bad, which no power cut does: the newest checkpoint may be lost.
    #[error("the newest superblock may be lost, generation {generation} is left: {cause}")]
    NewestLost {
        /// The best that is left.
        generation: u64,
        /// The fault of the other slot.
        cause: Box<SuperblockError>,
    },
    /// The medium failed.
    #[error("{0}")]
    Io(#[from] DeviceError),
}

impl Superblock {
    /// The slot that this generation is written to.
    #[must_use]
    pub fn slot(&self) -> usize {
        (self.generation % 2) as usize
    }

    /// The 4096 bytes on disk.
    #[must_use]
    pub fn encode(&self) -> Vec<u8> {
        let mut w = Writer::with_capacity(BYTES);
        w.raw(&MAGIC);
        w.u32(self.format_version);
        let flag = |is_set, flag| if is_set { flag } else { 0 };
        w.u32(
            flag(self.clean, FLAG_CLEAN)
                | flag(self.space_debt, FLAG_SPACE_DEBT)
                | flag(self.is_unfinished, FLAG_UNFINISHED),
        );
        w.raw(&self.uuid);
        w.u64(self.generation);
        w.u64(self.epoch);
        w.u64(self.volume_bytes);
        self.journal.encode(&mut w);
        w.u64(self.journal_start.offset);
        w.u64(self.journal_start.frame);
        self.node_table.encode(&mut w);
        self.space_map.encode(&mut w);
        w.raw(&[0; RESERVED_BYTES]);
        w.u64(self.root_node);
        w.u64(self.next_node);
        w.u64(self.next_seq);
        w.u32(self.leaf_bytes);
        w.u32(self.basement_bytes);
        w.u16(self.fanout);
        w.u8(self.codec.tag());
        w.u8(match self.codec {
            Codec::Zstd(level) => level.get(),
            Codec::Raw | Codec::Lz4 => 0,
        });
        w.u8(self.metadata_copies.count());
        w.pad_to(LABEL_AT);
        w.raw(self.label.as_str().as_bytes());
        w.pad_to(NODES_AT);
        w.u64(self.node_seed);
        w.u64(self.openings);
        debug_assert_eq!(w.len(), FIELDS_END);
        w.pad_to(CHECKSUM_AT);
        let sum = checksum(w.as_slice());
        w.u64(sum);
        w.into_vec()
    }

    /// The superblock that `bytes`, read from `slot`, hold.
    ///
    /// # Errors
    /// `NotAVolume` without the magic bytes, `NewerVersion`, `OlderVersion`, or `Corrupt`.
    pub fn decode(slot: usize, bytes: &[u8]) -> Result<Self, SuperblockError> {
        let corrupt = |detail: String| SuperblockError::Corrupt { slot, detail };
        if !bytes.starts_with(&MAGIC) {
            return Err(SuperblockError::NotAVolume);
        }
        if bytes.len() != BYTES {
            return Err(corrupt(format!("{} bytes instead of {BYTES}", bytes.len())));
        }
        let (body, sum) = bytes.split_at(CHECKSUM_AT);
        let malformed = |error: DecodeError| corrupt(error.to_string());
        let (found, expected) = (Reader::new(sum).u64().map_err(malformed)?, checksum(body));
        if found != expected {
            return Err(corrupt(format!(
                "checksum {found:#018x}, computed {expected:#018x}"
            )));
        }
        let mut r = Reader::new(&body[MAGIC.len()..]);
        let format_version = r.u32().map_err(malformed)?;
        if format_version > FORMAT_VERSION {
            return Err(SuperblockError::NewerVersion {
                found: format_version,
                known: FORMAT_VERSION,
            });
        }
        if format_version < FORMAT_VERSION && format_version > 0 {
            return Err(SuperblockError::OlderVersion {
                found: format_version,
                known: FORMAT_VERSION,
            });
        }
        let sb = Self::decode_fields(format_version, r).map_err(malformed)?;
        let volume = Extent::new(0, sb.volume_bytes);
        sb.journal
            .validate(volume)
            .map_err(|error| corrupt(error.to_string()))?;
        if sb.journal.addr < AREA_END || !sb.journal_start.offset.is_multiple_of(BLOCK_BYTES) {
            return Err(corrupt(format!("impossible journal {}", sb.journal)));
        }
        for page in [sb.node_table, sb.space_map] {
            let is_inside = |addr: &u64| {
                addr.is_multiple_of(BLOCK_BYTES) && (AREA_END..sb.volume_bytes).contains(addr)
            };
            let impossible = page.copies().find(|addr| !is_inside(addr));
            if let Some(addr) = impossible.filter(|_| !page.is_none()) {
                return Err(corrupt(format!("impossible page address {addr:#x}")));
            }
        }
        if sb.slot() != slot {
            return Err(corrupt(format!(
                "generation {} belongs elsewhere",
                sb.generation
            )));
        }
        Ok(sb)
    }

    fn decode_fields(format_version: u32, mut r: Reader<'_>) -> Result<Self, DecodeError> {
        let flags = r.u32()?;
        if flags & !(FLAG_CLEAN | FLAG_SPACE_DEBT | FLAG_UNFINISHED) != 0 || format_version == 0 {
            return Err(DecodeError::Value {
                field: "version or flags",
                found: flags.into(),
            });
        }
        let mut uuid = [0; 16];
        uuid.copy_from_slice(r.take(16)?);
        let sb = Self {
            uuid,
            format_version,
            generation: r.u64()?,
            epoch: r.u64()?,
            volume_bytes: r.u64()?,
            journal: Extent::decode(&mut r)?,
            journal_start: JournalPos {
                offset: r.u64()?,
                frame: r.u64()?,
            },
            node_table: PageRef::decode(&mut r)?,
            space_map: PageRef::decode(&mut r)?,
            root_node: {
                Reader::new(r.take(RESERVED_BYTES)?).finish_reserved()?;
                r.u64()?
            },
            next_node: r.u64()?,
            next_seq: r.u64()?,
            leaf_bytes: r.u32()?,
            basement_bytes: r.u32()?,
            fanout: r.u16()?,
            codec: {
                let (tag, level) = (r.u8()?, r.u8()?);
                let unknown = |field, found: u8| DecodeError::Value {
                    field,
                    found: found.into(),
                };
                match Codec::from_tag(tag).map_err(|_| unknown("codec", tag))? {
                    Codec::Zstd(_) => ZstdLevel::new(level).map(Codec::Zstd),
                    other => (level == 0).then_some(other),
                }
                .ok_or_else(|| unknown("level of the codec", level))?
            },
            clean: flags & FLAG_CLEAN != 0,
            space_debt: flags & FLAG_SPACE_DEBT != 0,
            is_unfinished: flags & FLAG_UNFINISHED != 0,
            metadata_copies: {
                let count = r.u8()?;
                MetadataCopies::from_count(count).ok_or(DecodeError::Value {
                    field: "copies of metadata",
                    found: count.into(),
                })?
            },
            label: {
                let reserved = r.take(3)?;
                if let Some(byte) = reserved.iter().find(|byte| **byte != 0) {
                    return Err(DecodeError::Value {
                        field: "reserved bytes",
                        found: (*byte).into(),
                    });
                }
                decode_label(r.take(Label::BYTES_MAX)?)?
            },
            node_seed: r.u64()?,
            openings: r.u64()?,
        };
        r.finish_reserved()?;
        Ok(sb)
    }
}

/// The label in its field, which zeros fill up.
fn decode_label(field: &[u8]) -> Result<Label, DecodeError> {
    let len = field
        .iter()
        .position(|byte| *byte == 0)
        .unwrap_or(field.len());
    let (text, rest) = field.split_at(len);
    let label = std::str::from_utf8(text)
        .ok()
        .and_then(|text| text.parse().ok());
    match label {
        Some(label) if rest.iter().all(|byte| *byte == 0) => Ok(label),
        _ => Err(DecodeError::Value {
            field: "label",
            found: len as u64,
        }),
    }
}

#[cfg(test)]
pub(super) mod tests {
    use super::*;

    /// A superblock of the volume that the tests of this folder use.
    pub(crate) fn sample(generation: u64) -> Superblock {
        Superblock {
            uuid: *b"0123456789abcdef",
            format_version: FORMAT_VERSION,
            generation,
            epoch: 3,
            volume_bytes: 16 << 20,
            journal: Extent::new(AREA_END, 1 << 20),
            journal_start: JournalPos {
                offset: 4096,
                frame: 77,
            },
            node_table: PageRef {
                addr: 0x0020_0000,
                copy: 0x0090_0000,
                checksum: 0x1111,
            },
            space_map: PageRef {
                addr: 0x0020_2000,
                copy: 0,
                checksum: 0x2222,
            },
            root_node: 9,
            next_node: 10,
            next_seq: 1000,
            leaf_bytes: 1 << 20,
            basement_bytes: 32 << 10,
            fanout: 64,
            codec: Codec::Lz4,
            clean: true,
            space_debt: false,
            is_unfinished: false,
            metadata_copies: MetadataCopies::Two,
            label: "Bücher".parse().expect("a label"),
            node_seed: 0x3333,
            openings: 8,
        }
    }

    fn reseal(bytes: &mut [u8]) {
        let sum = checksum(&bytes[..CHECKSUM_AT]);
        bytes[CHECKSUM_AT..].copy_from_slice(&sum.to_le_bytes());
    }

    #[test]
    fn golden_bytes() {
        let bytes = sample(6).encode();
        assert_eq!(bytes.len(), 4096);
        let mut want = Vec::new();
        want.extend_from_slice(b"RAMETvol\x0a\0\0\0\x01\0\0\x000123456789abcdef");
        for word in [
            6u64,
            3,
            16 << 20,
            131_072,
            1 << 20,
            4096,
            77,
            0x20_0000,
            0x90_0000,
            0x1111,
            0x20_2000,
            0,
            0x2222,
            0,
            0,
            0,
            9,
            10,
            1000,
        ] {
            want.extend_from_slice(&word.to_le_bytes());
        }
        want.extend_from_slice(&[0, 0, 16, 0, 0, 128, 0, 0, 64, 0, 1, 0]);
        want.extend_from_slice(&[2, 0, 0, 0]);
        want.extend_from_slice("Bücher".as_bytes());
        want.resize(264, 0);
        want.extend_from_slice(&[0x33, 0x33, 0, 0, 0, 0, 0, 0, 8, 0, 0, 0, 0, 0, 0, 0]);
        assert_eq!(want.len(), FIELDS_END);
        assert_eq!(bytes[..FIELDS_END], want);
        assert!(bytes[FIELDS_END..CHECKSUM_AT].iter().all(|&byte| byte == 0));
        assert_eq!(bytes[CHECKSUM_AT..], GOLDEN_SUM.to_le_bytes());
        assert_eq!(Superblock::decode(0, &bytes).unwrap(), sample(6));
    }

    #[test]
    fn the_level_of_zstd_follows_its_tag() {
        let mut sb = sample(6);
        sb.codec = Codec::Zstd(ZstdLevel::new(3).unwrap());
        let mut bytes = sb.encode();
        assert_eq!(bytes[194..196], [2, 3]);
        assert_eq!(Superblock::decode(0, &bytes).unwrap(), sb);
        for level in [0, 20] {
            bytes[195] = level;
            reseal(&mut bytes);
            let got = Superblock::decode(0, &bytes);
            assert!(
                matches!(got, Err(SuperblockError::Corrupt { .. })),
                "{level}"
            );
        }
    }

    const GOLDEN_SUM: u64 = 0x83e2_ac8a_18a6_c21b;

    #[test]
    fn every_flipped_byte_is_noticed() {
        let good = sample(6).encode();
        for at in 0..good.len() {
            let mut bad = good.clone();
            bad[at] ^= 0x40;
            let got = Superblock::decode(0, &bad);
            if at < MAGIC.len() {
                assert!(matches!(got, Err(SuperblockError::NotAVolume)), "byte {at}");
            } else {
                assert!(
                    matches!(got, Err(SuperblockError::Corrupt { .. })),
                    "byte {at}"
                );
            }
        }
    }

    #[test]
    fn nonsense_under_a_valid_checksum_is_corrupt() {
        // Offset and value: unknown flag, version 0, journal into the superblocks, journal start
        // unaligned, unaligned page, page outside, unaligned copy, unknown codec, level without
        // need, three copies, reserved bytes, a control character in the label, bytes that are no
        // text, and bytes behind its end.
        let forged: [(usize, u8); 15] = [
            (12, 8),
            (8, 0),
            (58, 0),
            (72, 1),
            (88, 1),
            (92, 1),
            (96, 1),
            (194, 9),
            (195, 1),
            (196, 3),
            (197, 1),
            (200, 10),
            (200, 0xff),
            (214, 1),
            (280, 1),
        ];
        for (at, value) in forged {
            let mut bytes = sample(6).encode();
            bytes[at] = value;
            reseal(&mut bytes);
            let got = Superblock::decode(0, &bytes);
            assert!(
                matches!(got, Err(SuperblockError::Corrupt { .. })),
                "byte {at}: {got:?}"
            );
        }
    }

    #[test]
    fn a_superblock_in_the_wrong_slot_is_corrupt() {
        let got = Superblock::decode(1, &sample(6).encode());
        assert!(matches!(got, Err(SuperblockError::Corrupt { slot: 1, .. })));
    }
}
