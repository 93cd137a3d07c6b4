//! The redo journal: records since the last checkpoint, in a preallocated circular region.
//!
//! Records gather in memory, in the order in which they are appended, in *frames*: whole blocks, so
//! that no write ever touches a block that holds durable records. A commit writes the frames that
//! have gathered, one sequential write a frame, and syncs the device once. All threads that wait
//! for one of those records wait for that one sync, and while it runs the next group gathers.
//!
//! ```text
//!        released                     durable        next
//!           |                            |             |
//!  ---------+----------------------------+-------------+----------> offset, grows for ever
//!   reusable|  replayed after a crash    |  queued     | unused
//!           +-------- at most the length of the region --------+
//! ```
//!
//! An offset lies at `offset % region.len` of the region. A frame does not wrap: when it does not
//! fit before the end of the region, it starts at the next multiple of the region's length.
//!
//! Invariants:
//! - J1: sequence numbers strictly rise along the journal, frame numbers count one by one.
//! - J2: no frame is written over a byte at or after `released` of the lap before.
//! - J3: `durable_seq` only covers records whose frames were written before a sync that succeeded,
//!   or that a durable checkpoint made needless.
//! - J5: a frame with records that name extents is written after a device sync that follows the
//!   writes of those extents; the extents keep their bytes until the frame is released.
//! - J4: after a failed write or sync no record is ever reported durable again. Which bytes of that
//!   write the device still holds is unknown, and a second sync that succeeds proves nothing about
//!   them. A write for which there was no room is no failure: its frame stays queued, in its place,
//!   and no caller was told that it is durable.
//!
//! Concurrency: one mutex, never held over I/O. One thread at a time is the *leader* and writes;
//! `append`, `cut` and `release` never wait for it.
//!
//! The journal does not know the meaning of records, and it does not wait for checkpoints. With no
//! room left `commit` fails with `NoSpace` and loses nothing, and a checkpoint serves the caller as
//! well.
//!
//! On a sparse device only a part of the region may have room on the host (`backing.rs`). Where the
//! host refuses more, a frame starts the next lap early, which a replay expects of every frame.

#[cfg(test)]
#[path = "tests/mod.rs"]
mod tests;

use std::collections::VecDeque;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use ramet_block::failpoints::{self, Fault};
use ramet_block::{BLOCK_BYTES, Call, Codec, Device, Extent, JournalPos, ZstdLevel, is_no_space};

use crate::error::{Error, Result, io_error};
use crate::journal::backing::{Backing, GiveBack, KEPT_BYTES};
use crate::journal::frame::{
    FrameBuilder, HEADER_BYTES, RECORD_HEADER_BYTES, Timeline, frame_bytes_max, is_valid_region,
    padded,
};
use crate::journal::replay;
use crate::sync::{Condvar, Mutex, MutexGuard};

/// Longest record that a journal in a region of `region_bytes` takes, in bytes.
pub(crate) fn record_bytes_max(region_bytes: u64) -> usize {
    let frame = usize::try_from(frame_bytes_max(region_bytes)).expect("a frame fits in memory");
    frame.saturating_sub(HEADER_BYTES + RECORD_HEADER_BYTES)
}

/// The start of a frame of `len_bytes` when `offset` is the end of the frame before it.
fn place(region_bytes: u64, offset: u64, len_bytes: u64) -> u64 {
    let left = region_bytes - offset % region_bytes;
    if len_bytes <= left {
        offset
    } else {
        offset + left
    }
}

/// A frame that takes no more records and waits to be written.
struct Sealed {
    frame: Frame,
    names_extents: bool,
    at: JournalPos,
    len_bytes: u64,
    last_seq: u64,
}

/// The contents of a sealed frame.
enum Frame {
    Gathered(FrameBuilder),
    /// The bytes for the device, which had no room for them.
    Encoded(Vec<u8>),
}

/// The frames that one leader writes.
struct Group {
    frames: VecDeque<Sealed>,
    durable_before: u64,
}

/// The state under the mutex.
struct Queue {
    open: FrameBuilder,
    sealed: VecDeque<Sealed>,
    /// Bytes of the region that `sealed` takes.
    sealed_bytes: u64,
    /// The place of the next frame to be sealed, if it fits there.
    next: JournalPos,
    /// Offset below which space may be reused.
    released: u64,
    /// Cuts that were not released yet, with the last sequence number before each.
    cuts: VecDeque<(JournalPos, u64)>,
    /// The place behind the last frame, when the last cut went on to the front of the region.
    left_at: Option<JournalPos>,
    appended_seq: Option<u64>,
    /// Written, perhaps not synced: all records up to this sequence number, and frames below this
    /// number.
    written_seq: u64,
    written_frame: u64,
    /// Durable: all records up to this sequence number, and frames below this number.
    durable_seq: u64,
    durable_frame: u64,
    /// A thread is writing or syncing.
    has_leader: bool,
    /// The reason why no frame is written any more.
    failure: Option<Arc<str>>,
}

/// The journal of a volume opened for writing. All methods may be called from any thread.
pub(crate) struct Journal {
    dev: Arc<dyn Device>,
    region: Extent,
    timeline: Timeline,
    /// Codec of the frames that are worth packing.
    codec: Codec,
    backing: Backing,
    queue: Mutex<Queue>,
    /// Bytes handed to the device since it was opened.
    written_bytes: AtomicU64,
    /// Signalled when the leader is done.
    led: Condvar,
}

impl Journal {
    /// Reads the records after `start` in order, of frames below the number `until`. See `replay.rs`.
    pub(crate) fn replay(
        dev: &dyn Device,
        region: Extent,
        (uuid_low, epoch): (u64, u64),
        start: JournalPos,
        until: Option<u64>,
        visit: &mut dyn FnMut(u64, &[u8]) -> Result<()>,
    ) -> Result<JournalPos> {
        let timeline = Timeline { uuid_low, epoch };
        replay::replay(dev, region, timeline, start, until, visit)
    }

    /// Reads the records after `start` up to the first loss, and returns the loss. See `replay.rs`.
    pub(crate) fn replay_prefix(
        dev: &dyn Device,
        region: Extent,
        (uuid_low, epoch): (u64, u64),
        start: JournalPos,
        visit: &mut dyn FnMut(u64, &[u8]) -> Result<()>,
    ) -> Result<(JournalPos, Option<Error>)> {
        let timeline = Timeline { uuid_low, epoch };
        replay::replay_prefix(dev, region, timeline, start, visit)
    }

    /// Clears the places behind `end` after a loss, when no frame is needed any more. See `replay.rs`.
    pub(crate) fn clear_behind(dev: &dyn Device, region: Extent, end: JournalPos) -> Result<()> {
        replay::clear_behind(dev, region, end)
    }

    /// A journal whose next frame goes to `at`, the answer of [`Journal::replay`] (or the default
    /// position in a new volume). In a volume with a codec frames are packed, always with a fast
    /// codec: threads wait for a frame, and it is soon gone.
    ///
    /// Before the first commit a superblock must be durable that names `epoch`, a number never used
    /// for this volume before, and `at` as the start of a replay: frames before `at` count as
    /// released. Nothing is read or written here; some of the region is allocated on a sparse
    /// device.
    ///
    /// # Panics
    /// When the region cannot hold a journal, which a replay of it reports as an error.
    pub(crate) fn open(
        dev: Arc<dyn Device>,
        region: Extent,
        uuid_low: u64,
        epoch: u64,
        codec: Codec,
        at: JournalPos,
    ) -> Journal {
        assert!(
            is_valid_region(region),
            "the journal's region was validated when it was decoded"
        );
        assert!(
            at.offset.is_multiple_of(BLOCK_BYTES),
            "frames start at whole blocks"
        );
        let backing = Backing::new(dev.clone(), region);
        backing.keep_first();
        Journal {
            dev,
            region,
            backing,
            timeline: Timeline { uuid_low, epoch },
            codec: match codec {
                Codec::Raw => Codec::Raw,
                // As fast as LZ4 on records, and an eighth smaller.
                Codec::Lz4 | Codec::Zstd(_) => Codec::Zstd(ZstdLevel::default()),
            },
            queue: Mutex::new(Queue {
                open: FrameBuilder::default(),
                sealed: VecDeque::new(),
                sealed_bytes: 0,
                next: at,
                released: at.offset,
                cuts: VecDeque::new(),
                left_at: None,
                appended_seq: None,
                written_seq: 0,
                written_frame: at.frame,
                durable_seq: 0,
                durable_frame: at.frame,
                has_leader: false,
                failure: None,
            }),
            written_bytes: AtomicU64::new(0),
            led: Condvar::new(),
        }
    }

    /// Queues a record, given in parts, behind all queued records. Works in memory only: the record
    /// is durable after a [`Journal::commit`] of `seq`. With `names_extents` all earlier writes to
    /// the device are made durable before the record is written (J5).
    ///
    /// # Panics
    /// When `seq` is not above that of the record before (J1), or the record is longer than
    /// [`record_bytes_max`] of the region: it could never be written.
    pub(crate) fn append(&self, seq: u64, record: &[&[u8]], names_extents: bool) {
        let len: usize = record.iter().map(|part| part.len()).sum();
        assert!(
            len <= record_bytes_max(self.region.len),
            "a record fits a frame"
        );
        let mut queue = self.queue.lock();
        assert!(
            queue.appended_seq.is_none_or(|last| last < seq),
            "J1: sequence numbers rise"
        );
        if padded(queue.open.covered_bytes_with(len)) > frame_bytes_max(self.region.len) {
            self.seal(&mut queue);
        }
        queue.open.push(seq, record);
        queue.open.names_extents |= names_extents;
        queue.appended_seq = Some(seq);
    }

    /// Makes all records up to and including `seq` durable. Many threads may call at once: a thread
    /// that finds no leader leads, and one device sync serves all threads that had appended before
    /// it. A `seq` beyond the last appended record stands for that record.
    ///
    /// # Errors
    /// `NoSpace` when the region is full up to frames that are not released, or the host has no
    /// room for more of it. Nothing is lost then: call again after a [`Journal::release`] (which
    /// may have made `seq` durable by itself). `Io` when a write or the sync failed; from then on
    /// `Poisoned`, for every caller and for ever.
    pub(crate) fn commit(&self, seq: u64) -> Result<()> {
        let mut queue = self.queue.lock();
        let seq = seq.min(queue.appended_seq.unwrap_or(0));
        loop {
            queue.check()?;
            if queue.durable_seq >= seq {
                return Ok(());
            }
            if queue.has_leader {
                self.led.wait(&mut queue);
                continue;
            }
            let group = self.take_group(&mut queue);
            if group.frames.is_empty() && queue.written_seq <= queue.durable_seq {
                return Err(Error::NoSpace);
            }
            queue = self.lead(queue, group, true)?;
        }
    }

    /// Writes all queued frames to the device without a sync, to bound the memory of the queue.
    /// Does nothing while another thread writes. Frames for which the region has no room stay
    /// queued.
    ///
    /// # Errors
    /// As [`Journal::commit`], except `NoSpace`.
    pub(crate) fn write_queued(&self) -> Result<()> {
        let queue = self.queue.lock();
        queue.check()?;
        if queue.has_leader {
            return Ok(());
        }
        self.write_group_of(queue)
    }

    /// The same, but waits for the end of a write of another thread.
    ///
    /// # Errors
    /// As [`Journal::write_queued`].
    pub(crate) fn write_queued_next(&self) -> Result<()> {
        let mut queue = self.queue.lock();
        while queue.has_leader {
            self.led.wait(&mut queue);
        }
        queue.check()?;
        self.write_group_of(queue)
    }

    fn write_group_of(&self, mut queue: MutexGuard<'_, Queue>) -> Result<()> {
        let group = self.take_group(&mut queue);
        if group.frames.is_empty() {
            return Ok(());
        }
        match self.lead(queue, group, false) {
            // The frame stays queued.
            Err(Error::NoSpace) => Ok(()),
            done => done.map(drop),
        }
    }

    #[cfg(test)]
    /// All records up to and including this sequence number are durable; 0 while no appended record
    /// is.
    pub(crate) fn durable_seq(&self) -> u64 {
        self.queue.lock().durable_seq
    }

    /// Frames with a smaller number are on the device, or no longer needed.
    pub(crate) fn durable_frame(&self) -> u64 {
        self.queue.lock().durable_frame
    }

    /// A position between all records appended so far and all records appended later. A replay on
    /// top of a checkpoint of this moment starts there. Works in memory only.
    pub(crate) fn cut(&self) -> JournalPos {
        let mut queue = self.queue.lock();
        self.seal(&mut queue);
        queue.note_cut()
    }

    /// The room of the region on the host of a sparse device.
    pub(crate) fn host_room(&self) -> HostRoom<'_> {
        HostRoom(self)
    }

    /// Tells the journal that a checkpoint is durable from which a replay starts at `pos`, an
    /// answer of [`Journal::cut`]. The space before `pos` may be reused. Records from before `pos`
    /// that are still queued count as durable and are not written any more.
    pub(crate) fn release(&self, pos: JournalPos) {
        let mut queue = self.queue.lock();
        assert!(
            pos.offset <= queue.next.offset,
            "a released position was cut before"
        );
        queue.released = queue.released.max(pos.offset);
        while queue
            .sealed
            .front()
            .is_some_and(|sealed| sealed.at.frame < pos.frame)
        {
            let sealed = queue.sealed.pop_front().expect("just seen");
            queue.sealed_bytes -= sealed.len_bytes;
        }
        while queue
            .cuts
            .front()
            .is_some_and(|(cut, _)| cut.frame <= pos.frame)
        {
            let (cut, seq) = queue.cuts.pop_front().expect("just seen");
            queue.written_seq = queue.written_seq.max(seq);
            queue.written_frame = queue.written_frame.max(cut.frame);
            queue.durable_seq = queue.durable_seq.max(seq);
            queue.durable_frame = queue.durable_frame.max(cut.frame);
        }
        self.led.notify_all();
    }

    /// Bytes of the region in use or promised to queued records.
    pub(crate) fn used_bytes(&self) -> u64 {
        let queue = self.queue.lock();
        self.end_with(&queue, None) - queue.released
    }

    /// Bytes handed to the device since it was opened.
    pub(crate) fn written_bytes(&self) -> u64 {
        self.written_bytes.load(Ordering::Relaxed)
    }

    /// Size of the region in bytes.
    pub(crate) fn capacity_bytes(&self) -> u64 {
        self.region.len
    }

    /// Bytes that wait in memory to be written.
    pub(crate) fn queued_bytes(&self) -> u64 {
        self.queue.lock().queued_bytes()
    }

    /// Bytes that wait in memory to be written, if a record of `bytes` can be appended and later be
    /// committed without a release in between, in any division of the queue into frames. One frame
    /// of reserve is kept for callers that ask at the same time.
    pub(crate) fn room_for(&self, bytes: usize) -> Option<u64> {
        let (queued, next, end, front) = {
            let queue = self.queue.lock();
            let end = self.end_with(&queue, Some(bytes));
            let has_room = end - queue.released + frame_bytes_max(self.region.len)
                <= self.region.len
                || failpoints::is_on(Fault::JournalOverrun);
            if !has_room {
                return None;
            }
            let alone = FrameBuilder::default().covered_bytes_with(bytes);
            let front = padded(queue.open.covered_bytes()) + padded(alone);
            let front = self.front(&queue, front);
            (queue.queued_bytes(), queue.next.offset, end, front)
        };
        let can_wrap = front.is_some();
        if self.is_backed(next, end) || can_wrap && self.backing.is_refused() {
            return Some(queued);
        }
        let is_refused = self
            .secure(next, end)
            .is_err_and(|error| is_no_space(&error));
        (can_wrap || !is_refused).then_some(queued)
    }

    /// Whether the host gave no room for more of the region when it was last asked.
    pub(crate) fn is_short_of_host(&self) -> bool {
        self.backing.is_refused()
    }

    /// The start of the next lap, if `len_bytes` from there on are released and have room on the
    /// host.
    fn front(&self, queue: &Queue, len_bytes: u64) -> Option<u64> {
        let start = queue.next.offset.next_multiple_of(self.region.len);
        let end = start + len_bytes;
        let is_free = end <= queue.released + self.region.len && len_bytes <= self.region.len;
        (is_free && self.backing.is_backed(0, len_bytes)).then_some(start)
    }

    /// Whether the host has given room for the bytes between two offsets, less than a lap apart.
    fn is_backed(&self, from: u64, to: u64) -> bool {
        self.laps(from, to)
            .all(|(start, end)| self.backing.is_backed(start, end))
    }

    /// Takes room of the host for the bytes between two offsets, less than a lap apart.
    fn secure(&self, from: u64, to: u64) -> std::io::Result<()> {
        self.laps(from, to)
            .try_for_each(|(start, end)| self.backing.secure(start, end))
    }

    /// The bytes of the region between two offsets, lap by lap.
    fn laps(&self, from: u64, to: u64) -> impl Iterator<Item = (u64, u64)> {
        let (start, len) = (from % self.region.len, to - from);
        let first = (start, (start + len).min(self.region.len));
        let rest = (start + len).saturating_sub(self.region.len);
        [first, (0, rest)].into_iter()
    }

    /// The offset after all queued records and one more record of `record` bytes, in the worst
    /// division into frames.
    fn end_with(&self, queue: &Queue, record: Option<usize>) -> u64 {
        let after = |offset: u64, covered: u64| match padded(covered) {
            0 => offset,
            len => place(self.region.len, offset, len) + len,
        };
        let end = after(queue.next.offset, queue.open.covered_bytes());
        let Some(len) = record else { return end };
        let apart = after(end, FrameBuilder::default().covered_bytes_with(len));
        let together = after(queue.next.offset, queue.open.covered_bytes_with(len));
        apart.max(together)
    }

    /// Gives the open frame its place, if it holds a record.
    fn seal(&self, queue: &mut Queue) {
        if queue.open.is_empty() {
            return;
        }
        let next = FrameBuilder::behind(&queue.open);
        let frame = std::mem::replace(&mut queue.open, next);
        let sealed = Sealed {
            names_extents: frame.names_extents,
            at: queue.next,
            len_bytes: padded(frame.covered_bytes()),
            last_seq: queue.appended_seq.expect("an open frame holds a record"),
            frame: Frame::Gathered(frame),
        };
        self.enqueue(queue, sealed);
    }

    /// Gives a frame that is not encoded yet the next place.
    fn enqueue(&self, queue: &mut Queue, mut sealed: Sealed) {
        let len_bytes = sealed.len_bytes;
        let mut offset = place(self.region.len, queue.next.offset, len_bytes);
        if self.backing.is_refused()
            && !self.is_backed(offset, offset + len_bytes)
            && let Some(front) = self.front(queue, len_bytes)
        {
            offset = front;
        }
        let frame = queue.next.frame;
        sealed.at = JournalPos { offset, frame };
        queue.sealed.push_back(sealed);
        queue.sealed_bytes += len_bytes;
        queue.next = JournalPos {
            offset: offset + len_bytes,
            frame: frame + 1,
        };
    }

    /// Takes all queued frames that fit the region. Keeps J2.
    fn take_group(&self, queue: &mut Queue) -> Group {
        self.seal(queue);
        let limit = queue.released + self.region.len;
        let fits = |sealed: &Sealed| {
            sealed.at.offset + sealed.len_bytes <= limit || failpoints::is_on(Fault::JournalOverrun)
        };
        let count = queue
            .sealed
            .iter()
            .take_while(|sealed| fits(sealed))
            .count();
        let frames: VecDeque<Sealed> = queue.sealed.drain(..count).collect();
        queue.sealed_bytes -= frames.iter().map(|sealed| sealed.len_bytes).sum::<u64>();
        Group {
            frames,
            durable_before: queue.durable_frame,
        }
    }

    /// Writes a group, and syncs if `sync` says so; the queue is unlocked meanwhile.
    fn lead<'a>(
        &'a self,
        mut queue: MutexGuard<'a, Queue>,
        mut group: Group,
        sync: bool,
    ) -> Result<MutexGuard<'a, Queue>> {
        let (mut seq, mut frame) = (queue.written_seq, queue.written_frame);
        if let Some(last) = group.frames.back() {
            (seq, frame) = (last.last_seq, last.at.frame + 1);
        }
        queue.has_leader = true;
        let outcome = MutexGuard::unlocked(&mut queue, || {
            // If the device panics, the other threads must not wait for this leader.
            let panic = PoisonOnPanic(self);
            let outcome = self.write_group(&mut group, sync);
            std::mem::forget(panic);
            outcome
        });
        queue.has_leader = false;
        self.led.notify_all();
        match outcome {
            Ok(()) => {
                queue.written_seq = queue.written_seq.max(seq);
                queue.written_frame = queue.written_frame.max(frame);
                if sync {
                    queue.durable_seq = queue.durable_seq.max(seq);
                    queue.durable_frame = queue.durable_frame.max(frame);
                }
                Ok(queue)
            }
            Err(Error::NoSpace) => {
                queue.take_back(group.frames);
                Err(Error::NoSpace)
            }
            Err(error) => {
                if !failpoints::is_on(Fault::FailureForgotten) {
                    queue.failure = Some(error.to_string().into());
                }
                Err(error)
            }
        }
    }

    /// Frames that were written leave the group; frames for which there was no room stay in it.
    fn write_group(&self, group: &mut Group, sync: bool) -> Result<()> {
        let failed = |call, what| {
            move |source: std::io::Error| {
                if is_no_space(&source) {
                    return Error::NoSpace;
                }
                io_error(call, what)(source)
            }
        };
        if group.frames.iter().any(|s| s.names_extents)
            && !failpoints::is_on(Fault::ExtentsUnsynced)
        {
            self.sync_device("the extents that the journal names")?;
        }
        while let Some(sealed) = group.frames.front_mut() {
            let (at, start) = (sealed.at, sealed.at.offset % self.region.len);
            let end = at.offset + sealed.len_bytes;
            self.secure(at.offset, end)
                .map_err(failed(Call::Take, "room for the journal"))?;
            let bytes = match &mut sealed.frame {
                Frame::Gathered(frame) => std::mem::take(frame).finish(
                    self.codec,
                    self.timeline,
                    at,
                    group.durable_before,
                ),
                Frame::Encoded(bytes) => std::mem::take(bytes),
            };
            assert!(
                start + bytes.len() as u64 <= self.region.len,
                "a frame does not wrap"
            );
            if let Err(error) = self.dev.write_at(self.region.addr + start, &bytes) {
                sealed.frame = Frame::Encoded(bytes);
                return Err(failed(Call::Write, "the journal")(error));
            }
            self.written_bytes
                .fetch_add(bytes.len() as u64, Ordering::Relaxed);
            group.frames.pop_front();
        }
        if sync && !failpoints::is_on(Fault::JournalUnsynced) {
            self.sync_device("the journal")?;
        }
        Ok(())
    }

    /// A sync that fails is a failure, for want of room too: another caller may count the lost
    /// bytes as durable.
    fn sync_device(&self, what: &'static str) -> Result<()> {
        self.dev.sync().map_err(io_error(Call::Sync, what))
    }
}

/// The room of a journal's region on the host of a sparse device.
pub(crate) struct HostRoom<'a>(&'a Journal);

impl HostRoom<'_> {
    /// As [`Journal::cut`], at the front of the region if that is released: all of it but the front
    /// can be given back to the host when the checkpoint is durable. A commit before that may be
    /// refused for want of space.
    pub(crate) fn cut_at_front(&self) -> JournalPos {
        let journal = self.0;
        let mut queue = journal.queue.lock();
        journal.seal(&mut queue);
        let end = queue.next;
        let front = end.offset.next_multiple_of(journal.region.len);
        if front <= queue.released + journal.region.len {
            queue.next.offset = front;
        }
        let cut = queue.note_cut();
        queue.left_at = Some(end);
        cut
    }

    /// Lets the journal go on where it was before [`HostRoom::cut_at_front`]: the checkpoint failed,
    /// and the rest of the lap has room. Frames that were sealed since are moved there. Does nothing
    /// when one of them was handed to the device, or another cut was made since.
    pub(crate) fn leave_front(&self) {
        let journal = self.0;
        let mut queue = journal.queue.lock();
        let Some(end) = queue.left_at.take() else {
            return;
        };
        let count = usize::try_from(queue.next.frame - end.frame).expect("frames in memory");
        let Some(first) = queue.sealed.len().checked_sub(count) else {
            return;
        };
        let is_encoded = |sealed: &Sealed| matches!(sealed.frame, Frame::Encoded(_));
        if end.offset < queue.released || queue.sealed.iter().skip(first).any(is_encoded) {
            return;
        }
        let moved = queue.sealed.split_off(first);
        queue.sealed_bytes -= moved.iter().map(|sealed| sealed.len_bytes).sum::<u64>();
        queue.next = end;
        for sealed in moved {
            journal.enqueue(&mut queue, sealed);
        }
    }

    /// Gives space that the journal can do without back to the host of a sparse device, if the host
    /// is short of it. Does nothing while another thread writes.
    pub(crate) fn give_back(&self) {
        self.give_back_because(GiveBack::HostIsShort);
    }

    /// The same for an idle volume, also on a host with much room: some of the space at each call, until
    /// [`HostRoom::is_spread`] is over.
    pub(crate) fn give_back_idle(&self) {
        self.give_back_because(GiveBack::Idle);
    }

    /// Whether space behind the front of the region may be allocated on the host of a sparse
    /// device, or is in use.
    pub(crate) fn is_spread(&self) -> bool {
        self.has_left_front() || self.0.backing.holds_more(|_, _| false)
    }

    /// Whether the next frame goes behind the front of the region of a sparse device.
    pub(crate) fn has_left_front(&self) -> bool {
        let journal = self.0;
        let end = journal.queue.lock().next.offset % journal.region.len + BLOCK_BYTES;
        journal.dev.is_sparse() && end > KEPT_BYTES.min(journal.region.len)
    }

    fn give_back_because(&self, why: GiveBack) {
        let journal = self.0;
        let mut queue = journal.queue.lock();
        if queue.has_leader || queue.failure.is_some() {
            return;
        }
        let (from, to) = (queue.released, journal.end_with(&queue, None) + BLOCK_BYTES);
        queue.has_leader = true;
        MutexGuard::unlocked(&mut queue, || {
            let panic = PoisonOnPanic(journal);
            journal.backing.give_back(why, |start, end| {
                journal
                    .laps(from, to)
                    .any(|(first, last)| first < end && start < last)
            });
            std::mem::forget(panic);
        });
        queue.has_leader = false;
        journal.led.notify_all();
    }
}

impl Queue {
    /// Notes that a checkpoint is being made of the records so far, all of which are sealed. Returns
    /// the place behind them.
    fn note_cut(&mut self) -> JournalPos {
        let at = self.next;
        let seq = self.appended_seq.unwrap_or(0);
        self.cuts.push_back((at, seq));
        self.left_at = None;
        at
    }

    /// Puts frames that a leader could not write back to the front of the queue.
    fn take_back(&mut self, frames: VecDeque<Sealed>) {
        for sealed in frames.into_iter().rev() {
            // A checkpoint may have made the frame needless meanwhile.
            if sealed.at.frame >= self.durable_frame {
                self.sealed_bytes += sealed.len_bytes;
                self.sealed.push_front(sealed);
            }
        }
    }

    /// Bytes that wait in memory to be written.
    fn queued_bytes(&self) -> u64 {
        self.sealed_bytes + self.open.covered_bytes()
    }

    fn check(&self) -> Result<()> {
        match &self.failure {
            Some(reason) => Err(Error::Poisoned(reason.clone())),
            None => Ok(()),
        }
    }
}

/// Dropped only while a panic passes through the leader. Keeps J4.
struct PoisonOnPanic<'a>(&'a Journal);

impl Drop for PoisonOnPanic<'_> {
    fn drop(&mut self) {
        let mut queue = self.0.queue.lock();
        queue.has_leader = false;
        queue.failure = Some("the thread that wrote the journal panicked".into());
        self.0.led.notify_all();
    }
}
