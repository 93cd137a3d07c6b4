//! Recovery: the frames of the journal are found in the region, from its bytes alone.
//!
//! The frame numbered *n* after `offset` starts at `offset`, or, when it did not fit before the end
//! of the region, at the next multiple of the region's length. A frame counts when its checksum
//! holds and its header names this volume, this epoch, this number and this offset; so no older
//! lap, no older mount and no misdirected write passes. The first place without a valid frame is
//! the end of the journal. Frames beyond it were never acknowledged, because a commit syncs all
//! frames before its own.
//!
//! One case is different. If a later frame is there and says that the missing frame was durable
//! when it was written, then the medium lost acknowledged records, and recovery says so instead of
//! silently going back in time. Only the places where the next frame can start are searched, one
//! frame's length, so that the cost is bounded.
//!
//! A volume with such a loss can still be opened in the state before the missing frame, when the
//! caller asks for it ([`replay_prefix`]).
//!
//! Memory: two longest frames at most, for any headers. Any bytes end in an answer.

use ramet_block::failpoints::{self, Fault};
use ramet_block::{BLOCK_BYTES, Call, Device, Extent, JournalPos, is_no_space};

use crate::error::{Error, Result, io_error};
use crate::journal::frame::{
    Header, Timeline, frame_bytes_max, is_intact, is_valid_region, payload, records,
};

/// Bytes read at a time where only headers are looked for.
const SEARCH_BYTES: u64 = 256 << 10;

struct Reader<'a> {
    dev: &'a dyn Device,
    region: Extent,
    timeline: Timeline,
}

/// Calls `visit(seq, record)` for each record of each frame from `start` on, in order, and returns
/// the place of the next frame. Frames from the number `until` on are left out, and not looked for.
/// Nothing is written.
///
/// # Errors
/// `Io` when the device fails, `Corrupt` when acknowledged records are missing or an intact frame
/// holds nonsense, `Invalid` when no journal fits `region`, and the errors of `visit`.
pub(super) fn replay(
    dev: &dyn Device,
    region: Extent,
    timeline: Timeline,
    start: JournalPos,
    until: Option<u64>,
    visit: &mut dyn FnMut(u64, &[u8]) -> Result<()>,
) -> Result<JournalPos> {
    let mut end = start;
    walk(dev, region, timeline, &mut end, until, visit)?;
    Ok(end)
}

/// As [`replay`], for a journal that may have lost acknowledged records: ends before the first frame
/// that is missing, cannot be read, or does not hold records that `visit` takes. Returns the place
/// of that frame, and the reason.
///
/// # Errors
/// `Invalid` when no journal fits `region`.
pub(super) fn replay_prefix(
    dev: &dyn Device,
    region: Extent,
    timeline: Timeline,
    start: JournalPos,
    visit: &mut dyn FnMut(u64, &[u8]) -> Result<()>,
) -> Result<(JournalPos, Option<Error>)> {
    let mut end = start;
    match walk(dev, region, timeline, &mut end, None, visit) {
        Ok(()) => Ok((end, None)),
        Err(error @ (Error::Corrupt { .. } | Error::Io { .. })) => Ok((end, Some(error))),
        Err(error) => Err(error),
    }
}

/// Writes zeros where a recovery that finds the end of the journal at `end` looks for frames: after a
/// loss, so that sectors that could not be read can be. Frames before `end` may lie there too, so a
/// checkpoint must hold their records by now.
///
/// # Errors
/// `Io`. Durable with the next sync.
pub(super) fn clear_behind(dev: &dyn Device, region: Extent, end: JournalPos) -> Result<()> {
    let zeros = vec![0; SEARCH_BYTES as usize];
    for (first, last) in searched(region, end) {
        let mut offset = first;
        while offset <= last {
            let len = SEARCH_BYTES.min(last + BLOCK_BYTES - offset);
            let addr = region.addr + offset % region.len;
            match dev.write_at(addr, &zeros[..len as usize]) {
                // A hole of a sparse device has no sector that cannot be read.
                Err(error) if is_no_space(&error) => {}
                written => written.map_err(io_error(Call::Write, "the journal"))?,
            }
            offset += len;
        }
    }
    Ok(())
}

/// First and last offsets at which the frame after a missing one may start. The missing frame lay at
/// `end` or at the start of the next lap; the frame after it starts at most a frame's length later.
fn searched(region: Extent, end: JournalPos) -> [(u64, u64); 2] {
    let lap_end = end.offset - end.offset % region.len + region.len;
    let reach = frame_bytes_max(region.len);
    let here = (end.offset, (end.offset + reach).min(lap_end - BLOCK_BYTES));
    [here, (lap_end, lap_end + reach)]
}

/// Visits frames from `at` on, which follows: it is the place behind the last frame whose records
/// were all visited.
fn walk(
    dev: &dyn Device,
    region: Extent,
    timeline: Timeline,
    at: &mut JournalPos,
    until: Option<u64>,
    visit: &mut dyn FnMut(u64, &[u8]) -> Result<()>,
) -> Result<()> {
    let start = *at;
    if !is_valid_region(region) || !start.offset.is_multiple_of(BLOCK_BYTES) {
        return Err(Error::Invalid(
            "the journal does not consist of whole blocks",
        ));
    }
    if start.offset > u64::MAX / 2 || start.frame > u64::MAX / 2 {
        return Err(Error::Invalid(
            "the journal starts at a position that no volume reaches",
        ));
    }
    let reader = Reader {
        dev,
        region,
        timeline,
    };
    let mut last_seq = None;
    while until.is_none_or(|until| at.frame < until) {
        let Some((header, mut bytes)) = reader.next_frame(*at)? else {
            return reader.check_nothing_lost(*at);
        };
        let addr = reader.addr(header.at.offset);
        let mut expected_seq = Some(header.first_seq);
        let payload = payload(&header, &mut bytes)
            .ok_or_else(|| nonsense(addr, "the records do not unpack"))?;
        for record in records(&header, &payload) {
            let (seq, body) = record.ok_or_else(|| nonsense(addr, "a record leaves the frame"))?;
            if expected_seq.take().is_some_and(|first| first != seq) {
                return Err(nonsense(addr, "the first record is not the one it names"));
            }
            if last_seq.is_some_and(|last| last >= seq) {
                return Err(nonsense(addr, "sequence numbers do not rise"));
            }
            last_seq = Some(seq);
            visit(seq, body)?;
        }
        *at = JournalPos {
            offset: header.at.offset + header.taken_bytes(),
            frame: at.frame + 1,
        };
    }
    Ok(())
}

fn nonsense(addr: u64, detail: &str) -> Error {
    Error::Corrupt {
        what: "journal frame",
        addr,
        detail: detail.to_owned(),
    }
}

impl Reader<'_> {
    fn addr(&self, offset: u64) -> u64 {
        self.region.addr + offset % self.region.len
    }

    fn lap_end(&self, offset: u64) -> u64 {
        offset - offset % self.region.len + self.region.len
    }

    fn read(&self, offset: u64, len_bytes: u64) -> Result<Vec<u8>> {
        let len = usize::try_from(len_bytes).expect("a frame fits in memory");
        let mut bytes = vec![0; len];
        self.dev
            .read_at(self.addr(offset), &mut bytes)
            .map_err(io_error(Call::Read, "the journal"))?;
        Ok(bytes)
    }

    /// The frame with number and offset `at`, here or at the start of the next lap, with header and
    /// records.
    fn next_frame(&self, at: JournalPos) -> Result<Option<(Header, Vec<u8>)>> {
        let here = self.frame_at(at)?;
        if here.is_some() || at.offset.is_multiple_of(self.region.len) {
            return Ok(here);
        }
        self.frame_at(JournalPos {
            offset: self.lap_end(at.offset),
            frame: at.frame,
        })
    }

    fn frame_at(&self, at: JournalPos) -> Result<Option<(Header, Vec<u8>)>> {
        let block = self.read(at.offset, BLOCK_BYTES)?;
        let Some(header) = self
            .plausible(&block, at.offset)
            .filter(|header| header.at == at)
        else {
            return Ok(None);
        };
        let bytes = self.intact(&header)?;
        Ok(bytes.map(|bytes| (header, bytes)))
    }

    /// The header at the start of `block`, if it is of this timeline, names `offset` and has a
    /// length that fits there.
    fn plausible(&self, block: &[u8], offset: u64) -> Option<Header> {
        let header = Header::decode(block)?;
        let len_max = frame_bytes_max(self.region.len).min(self.lap_end(offset) - offset);
        let is_older = failpoints::is_on(Fault::OlderEpochAccepted)
            && header.timeline.epoch < self.timeline.epoch;
        let fits = (header.timeline == self.timeline || is_older)
            && header.at.offset == offset
            && header.taken_bytes() <= len_max;
        fits.then_some(header)
    }

    fn intact(&self, header: &Header) -> Result<Option<Vec<u8>>> {
        let bytes = self.read(header.at.offset, header.covered_bytes())?;
        Ok(is_intact(&bytes).then_some(bytes))
    }

    /// Fails if a frame after `end` proves that the frame at `end` had been durable.
    fn check_nothing_lost(&self, end: JournalPos) -> Result<()> {
        for (first, last) in searched(self.region, end) {
            let mut offset = first;
            while offset <= last {
                let len = SEARCH_BYTES.min(last + BLOCK_BYTES - offset);
                let chunk = self.read(offset, len)?;
                for block in chunk.chunks_exact(BLOCK_BYTES as usize) {
                    self.check_follower(end, block, offset)?;
                    offset += BLOCK_BYTES;
                }
            }
        }
        Ok(())
    }

    fn check_follower(&self, end: JournalPos, block: &[u8], offset: u64) -> Result<()> {
        let follows =
            |header: &Header| header.at.frame > end.frame && header.durable_before > end.frame;
        let Some(header) = self.plausible(block, offset).filter(follows) else {
            return Ok(());
        };
        if self.intact(&header)?.is_none() || failpoints::is_on(Fault::LostFrameIgnored) {
            return Ok(());
        }
        Err(Error::Corrupt {
            what: "journal frame",
            addr: self.addr(end.offset),
            detail: format!(
                "frame {} is unreadable, but was durable before frame {} was written",
                end.frame, header.at.frame
            ),
        })
    }
}
