//! The bytes of one journal frame. `docs/format.md` draws them.
//!
//! ```text
//!   0 checksum        8 magic           12 mask          16 uuid low      24 epoch       32 frame
//!  40 offset         48 durable before  56 first seq     64 payload len   68 record count
//!  72 stored len     76 codec           80 records ..., then zeros to a multiple of 4096
//! ```
//!
//! The checksum covers the stored bytes from byte 8 to the end of the records. The padding is not
//! covered: nothing is lost with it.
//!
//! **Packed frames.** Records repeat keys and values, so a frame of some length is compressed when
//! it is written, by the thread that writes it and outside of all locks. Its place was given away
//! before, when its compressed length was not known: a frame *takes* the space of its raw records,
//! the next frame starts behind that, and the blocks between are not written.
//!
//! **The magic marks frames, and nothing else.** Data of users ends up inside records, so a file
//! could hold the image of a frame. A recovery that looks for the next frame in the remains of an
//! older lap could take it for one. In every block of a frame but the first, the word at the place
//! of the magic is therefore XORed with `mask`. The writer chooses the mask (almost always 0) so
//! that none of these words reads as the magic.

use std::borrow::Cow;

use ramet_block::codec::{compress, decompress};
use ramet_block::encoding::{Reader, Writer};
use ramet_block::failpoints::{self, Fault};
use ramet_block::{BLOCK_BYTES, Codec, Extent, JournalPos, checksum};

/// First bytes after the checksum of every frame.
pub(super) const MAGIC: u32 = u32::from_le_bytes(*b"RmJf");
/// Bytes before the first record.
pub(super) const HEADER_BYTES: usize = 80;
/// Bytes before the body of each record: sequence number and length.
pub(super) const RECORD_HEADER_BYTES: usize = 12;

/// A frame of so many blocks is compressed. A shorter frame is a lone fsync of little data: a
/// thread waits for it, and packing could save a block or two.
const PACKED_BLOCKS_MIN: usize = 4;

const BLOCK: usize = BLOCK_BYTES as usize;
/// Bytes of the checksum, and the start of the bytes that it covers.
const MAGIC_AT: usize = 8;

const _: () = assert!(HEADER_BYTES < BLOCK);

/// The volume and the mount to which a frame belongs.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Timeline {
    /// Low half of the volume's UUID: frames of an older volume in the same place are no frames.
    pub(super) uuid_low: u64,
    /// One number for each read-write mount: frames that a recovery dropped stay dropped.
    pub(super) epoch: u64,
}

/// The header of a frame.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Header {
    /// XORed into the word at the place of the magic in each further block.
    pub(super) mask: u32,
    /// Timeline of the frame.
    pub(super) timeline: Timeline,
    /// Position of the frame.
    pub(super) at: JournalPos,
    /// Frames with a smaller number were durable, or released, when this frame was written.
    pub(super) durable_before: u64,
    /// Sequence number of the first record.
    pub(super) first_seq: u64,
    /// Bytes of records, raw.
    pub(super) payload_len: u32,
    /// Number of records, at least one.
    pub(super) record_count: u32,
    /// Bytes of stored records, no more than raw.
    pub(super) stored_len: u32,
    /// Storage of the records: tag of a [`Codec`].
    pub(super) codec: u32,
}

impl Header {
    /// Reads the header at the start of `block`; `None` when no frame starts there. The checksum is
    /// not verified: that needs the whole frame.
    pub(super) fn decode(block: &[u8]) -> Option<Header> {
        let mut fields = Reader::new(block.get(MAGIC_AT..HEADER_BYTES)?);
        let mut u64 = || fields.u64().ok();
        let magic_and_mask = u64()?;
        let header = Header {
            mask: (magic_and_mask >> 32) as u32,
            timeline: Timeline {
                uuid_low: u64()?,
                epoch: u64()?,
            },
            at: JournalPos {
                frame: u64()?,
                offset: u64()?,
            },
            durable_before: u64()?,
            first_seq: u64()?,
            payload_len: fields.u32().ok()?,
            record_count: fields.u32().ok()?,
            stored_len: fields.u32().ok()?,
            codec: fields.u32().ok()?,
        };
        let is_frame = magic_and_mask as u32 == MAGIC && header.stored_len <= header.payload_len;
        is_frame.then_some(header)
    }

    /// The header without its checksum.
    fn encode(&self) -> Vec<u8> {
        let mut fields = Writer::with_capacity(HEADER_BYTES);
        fields.u64(0);
        fields.u32(MAGIC);
        fields.u32(self.mask);
        fields.u64(self.timeline.uuid_low);
        fields.u64(self.timeline.epoch);
        fields.u64(self.at.frame);
        fields.u64(self.at.offset);
        fields.u64(self.durable_before);
        fields.u64(self.first_seq);
        fields.u32(self.payload_len);
        fields.u32(self.record_count);
        fields.u32(self.stored_len);
        fields.u32(self.codec);
        fields.into_vec()
    }

    /// Bytes of the stored header and records.
    pub(super) fn covered_bytes(&self) -> u64 {
        HEADER_BYTES as u64 + u64::from(self.stored_len)
    }

    /// Bytes of the region that the frame takes, written or not.
    pub(super) fn taken_bytes(&self) -> u64 {
        padded(HEADER_BYTES as u64 + u64::from(self.payload_len))
    }
}

/// Rounds up to whole blocks.
pub(super) fn padded(len_bytes: u64) -> u64 {
    len_bytes.next_multiple_of(BLOCK_BYTES)
}

/// Whether `bytes`, the stored header and records, carry their own checksum.
pub(super) fn is_intact(bytes: &[u8]) -> bool {
    let sum = Reader::new(bytes).u64();
    let is_right = |sum| sum == checksum(&bytes[MAGIC_AT..]);
    bytes.len() >= HEADER_BYTES
        && sum.is_ok_and(|sum| is_right(sum) || failpoints::is_on(Fault::FrameChecksumSkipped))
}

fn word_at(bytes: &[u8], at: usize) -> u32 {
    u32::from_le_bytes(bytes[at..at + 4].try_into().expect("four bytes"))
}

/// The places of the word of the magic in the blocks after the first, as far as all of the word is
/// records.
fn further_words(len: usize) -> impl Iterator<Item = usize> {
    (BLOCK + MAGIC_AT..)
        .step_by(BLOCK)
        .take_while(move |at| at + 4 <= len)
}

fn apply_mask(bytes: &mut [u8], mask: u32) {
    if mask != 0 {
        for at in further_words(bytes.len()) {
            let word = word_at(bytes, at) ^ mask;
            bytes[at..at + 4].copy_from_slice(&word.to_le_bytes());
        }
    }
}

/// A mask under which no further block reads as a frame. A frame of n blocks rules out fewer than n
/// masks.
fn choose_mask(bytes: &[u8]) -> u32 {
    (0..=u32::MAX)
        .find(|mask| further_words(bytes.len()).all(|at| word_at(bytes, at) != MAGIC ^ mask))
        .expect("a frame has fewer than 2^32 blocks")
}

/// A frame that still gathers records.
#[derive(Debug, Default)]
pub(super) struct FrameBuilder {
    /// The space of the header, then records.
    bytes: Writer,
    first_seq: u64,
    record_count: u32,
    /// Whether a record names extents, which must be durable before the frame is written.
    pub(super) names_extents: bool,
}

/// Most bytes that a new frame takes room for ahead.
const AHEAD_BYTES_MAX: usize = 64 << 10;

impl FrameBuilder {
    /// An empty frame with room for the bytes of the one before, so that it seldom grows.
    pub(super) fn behind(before: &Self) -> Self {
        Self {
            bytes: Writer::with_capacity(before.bytes.len().min(AHEAD_BYTES_MAX)),
            ..Self::default()
        }
    }

    pub(super) fn is_empty(&self) -> bool {
        self.record_count == 0
    }

    /// Bytes of header and raw records; 0 without records.
    pub(super) fn covered_bytes(&self) -> u64 {
        self.bytes.len() as u64
    }

    /// Bytes of header and records with one more record of `len` bytes.
    pub(super) fn covered_bytes_with(&self, len: usize) -> u64 {
        self.bytes.len().max(HEADER_BYTES) as u64 + (RECORD_HEADER_BYTES + len) as u64
    }

    pub(super) fn push(&mut self, seq: u64, parts: &[&[u8]]) {
        if self.is_empty() {
            self.bytes.pad_to(HEADER_BYTES);
            self.first_seq = seq;
        }
        let len: usize = parts.iter().map(|part| part.len()).sum();
        let len = u32::try_from(len).expect("a record fits a frame, and a frame 32 bits");
        self.bytes.u64(seq);
        self.bytes.u32(len);
        for part in parts {
            self.bytes.raw(part);
        }
        self.record_count += 1;
    }

    /// The bytes for the device, a whole number of blocks: packed with `codec` if that saves a
    /// block.
    pub(super) fn finish(
        self,
        codec: Codec,
        timeline: Timeline,
        at: JournalPos,
        durable_before: u64,
    ) -> Vec<u8> {
        let mut bytes = self.bytes.into_vec();
        let bytes_of =
            |frame: &[u8]| u32::try_from(frame.len() - HEADER_BYTES).expect("a frame fits 32 bits");
        let payload_len = bytes_of(&bytes);
        let codec = if pack(codec, &mut bytes) {
            codec
        } else {
            Codec::Raw
        };
        let header = Header {
            mask: choose_mask(&bytes),
            timeline,
            at,
            durable_before,
            first_seq: self.first_seq,
            payload_len,
            record_count: self.record_count,
            stored_len: bytes_of(&bytes),
            codec: codec.tag().into(),
        };
        apply_mask(&mut bytes, header.mask);
        bytes[..HEADER_BYTES].copy_from_slice(&header.encode());
        let sum = checksum(&bytes[MAGIC_AT..]);
        bytes[..MAGIC_AT].copy_from_slice(&sum.to_le_bytes());
        bytes.resize(bytes.len().next_multiple_of(BLOCK), 0);
        bytes
    }
}

/// Packs the bytes behind the header if that saves a block of the device; says whether it did.
fn pack(codec: Codec, bytes: &mut Vec<u8>) -> bool {
    let blocks = |payload: &[u8]| (HEADER_BYTES + payload.len()).div_ceil(BLOCK);
    let payload = &bytes[HEADER_BYTES..];
    if blocks(payload) < PACKED_BLOCKS_MIN {
        return false;
    }
    let saves = |packed: &Vec<u8>| blocks(packed) < blocks(payload);
    let Some(packed) = compress(codec, payload).filter(saves) else {
        return false;
    };
    bytes.truncate(HEADER_BYTES);
    bytes.extend_from_slice(&packed);
    true
}

/// The raw records of an intact frame. `bytes` are the stored header and records; the mask is taken
/// off in place. `None` when the records contradict the header. Takes at most the memory of a
/// longest frame, if the header is of a frame that fits the region.
pub(super) fn payload<'a>(header: &Header, bytes: &'a mut [u8]) -> Option<Cow<'a, [u8]>> {
    apply_mask(bytes, header.mask);
    let stored = &bytes[HEADER_BYTES..];
    let codec = Codec::from_tag(u8::try_from(header.codec).ok()?).ok()?;
    let payload_len = usize::try_from(header.payload_len).ok()?;
    match codec {
        Codec::Raw => (stored.len() == payload_len).then_some(Cow::Borrowed(stored)),
        codec => Some(Cow::Owned(decompress(codec, stored, payload_len).ok()?)),
    }
}

/// The records of a frame, in order. `None` in place of a record that does not follow the format.
pub(super) fn records<'a>(
    header: &Header,
    payload: &'a [u8],
) -> impl Iterator<Item = Option<(u64, &'a [u8])>> + use<'a> {
    let mut rest = payload;
    let mut left = header.record_count;
    let mut bad = header.record_count == 0;
    std::iter::from_fn(move || {
        if std::mem::take(&mut bad) {
            left = 0;
            rest = &[];
            return Some(None);
        }
        if left == 0 {
            return (!std::mem::take(&mut rest).is_empty()).then_some(None);
        }
        left -= 1;
        let record = split_record(rest);
        match record {
            Some((seq, body, after)) => {
                rest = after;
                Some(Some((seq, body)))
            }
            None => {
                left = 0;
                rest = &[];
                Some(None)
            }
        }
    })
}

fn split_record(bytes: &[u8]) -> Option<(u64, &[u8], &[u8])> {
    let mut fields = Reader::new(bytes);
    let seq = fields.u64().ok()?;
    let len = usize::try_from(fields.u32().ok()?).ok()?;
    let body = fields.take(len).ok()?;
    Some((seq, body, &bytes[fields.position()..]))
}

/// Smallest region that can serve as a journal, in bytes.
pub(crate) const REGION_BYTES_MIN: u64 = 16 * BLOCK_BYTES;

/// Longest frame in a large region, in bytes. It bounds the memory of a replay, and how much a
/// commit writes in one request.
const FRAME_BYTES_MAX: u64 = 8 << 20;

/// Longest frame in a region of `region_bytes`: a quarter of it, so that the space lost at the end
/// of a lap stays a minor part.
pub(crate) fn frame_bytes_max(region_bytes: u64) -> u64 {
    let quarter = region_bytes / 4;
    (quarter - quarter % BLOCK_BYTES).min(FRAME_BYTES_MAX)
}

/// Whether a region can hold a journal: whole blocks, and not too few.
pub(crate) fn is_valid_region(region: Extent) -> bool {
    region.len >= REGION_BYTES_MIN
        && region.len.is_multiple_of(BLOCK_BYTES)
        && region.addr.is_multiple_of(BLOCK_BYTES)
        && region.addr.checked_add(region.len).is_some()
}
