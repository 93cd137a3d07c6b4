//! The contents of files: all blocks of a new file, and the blocks of a file that differ from those
//! of another one.

use std::sync::Arc;

use bytes::Bytes;
use ramet_betree::{Diff, Difference};

use crate::error::Result;
use crate::format::blocks::{BLOCK_BYTES, block_number, blocks_of, trimmed};
use crate::format::keys;
use crate::format::stream::StreamItem;
use crate::tools::diff::{Object, Side};
use crate::tools::send::completion::Completion;
use crate::tools::send::out::Out;

/// Most bytes of an item of data.
const RUN_BYTES: usize = 64 << 10;
/// Bytes of a scan beyond which blocks are read ahead in large pieces.
const LARGE_BYTES: u64 = 256 << 10;

/// Neighbouring blocks of one file.
#[derive(Default)]
struct Run {
    offset: u64,
    bytes: Vec<u8>,
}

impl Run {
    /// Whether a block behind the run makes it longer.
    fn takes(&self, offset: u64) -> bool {
        let end = self.offset + self.bytes.len() as u64;
        !self.bytes.is_empty() && end == offset && self.bytes.len() < RUN_BYTES
    }

    /// Adds a block of a file of so many bytes. A short block goes on with zeros.
    fn add(&mut self, offset: u64, block: &[u8], size_bytes: u64) {
        if self.bytes.is_empty() {
            self.offset = offset;
        }
        let len = usize::try_from((size_bytes - offset).min(BLOCK_BYTES)).expect("one block");
        let block = &block[..block.len().min(len)];
        let end = self.bytes.len() + len;
        self.bytes.extend_from_slice(block);
        self.bytes.resize(end, 0);
    }

    /// Sends the blocks, and begins anew.
    fn put(&mut self, object: &Bytes, out: &mut Out) {
        if !self.bytes.is_empty() {
            let (offset, bytes) = (self.offset, &self.bytes[..]);
            out.put_of(object, &StreamItem::Data { offset, bytes });
        }
        *self = Self::default();
    }
}

/// The part of a file that is to be sent.
pub(super) enum Part<T> {
    Rest(T),
    Completion(Box<Completion>),
}

/// A new file whose contents are being sent.
pub(super) struct Contents {
    object: Bytes,
    side: Arc<Side>,
    file: Object,
    /// The next block.
    next: u64,
}

impl Contents {
    pub(super) fn new(object: Bytes, side: Arc<Side>, file: Object) -> Self {
        Self {
            object,
            side,
            file,
            next: 0,
        }
    }
}

impl Contents {
    /// Sends blocks until the section is full. Answers the rest, or the completion of the file.
    pub(super) fn go_on(mut self, out: &mut Out) -> Result<Part<Self>> {
        let size_bytes = self.file.record.size_bytes;
        let blocks = keys::blocks(&self.file.path);
        let mut run = Run::default();
        let last = blocks_of(size_bytes);
        if self.next < last {
            let lo = keys::block(&blocks, self.next);
            let hi = keys::block(&blocks, last);
            let mut scan = self.side.snapshot.scan(&lo, Some(&hi));
            if size_bytes >= LARGE_BYTES {
                scan = scan.eager();
            }
            while scan.advance()? {
                let number = block_number(&blocks, scan.key())?;
                let offset = number * BLOCK_BYTES;
                if !run.takes(offset) {
                    run.put(&self.object, out);
                    if out.is_full() {
                        self.next = number;
                        return Ok(Part::Rest(self));
                    }
                }
                run.add(offset, scan.value(), size_bytes);
            }
        }
        run.put(&self.object, out);
        let new = (self.side, self.file);
        Ok(Part::Completion(Completion::of_new(self.object, new)))
    }
}

/// A file that is another one on the receiver, and whose differences are being sent.
pub(super) struct Differing {
    object: Bytes,
    old: (Arc<Side>, Object),
    new: (Arc<Side>, Object),
    diff: Option<Diff>,
    /// A block that the section before had no room for.
    pending: Option<Difference>,
    touched: bool,
}

impl Differing {
    pub(super) fn new(object: Bytes, old: (Arc<Side>, Object), new: (Arc<Side>, Object)) -> Self {
        Self {
            object,
            old,
            new,
            diff: None,
            pending: None,
            touched: false,
        }
    }

    fn diff(&self) -> Result<Diff> {
        let [before, after] = [&self.old, &self.new].map(|(_, file)| keys::blocks(&file.path));
        self.old.0.diff(before, &self.new.0, after)
    }

    /// Whether less than half of the file differs.
    pub(super) fn is_worth_a_copy(&self) -> Result<bool> {
        let few = blocks_of(self.new.1.record.size_bytes) / 2;
        let mut count = 0;
        for item in self.diff()? {
            let item = item?;
            count += u64::from(trimmed(item.before.as_ref()) != trimmed(item.after.as_ref()));
            if count > few {
                return Ok(false);
            }
        }
        Ok(true)
    }
}

impl Differing {
    /// Sends differing blocks until the section is full. Answers the rest, or the completion of the
    /// file.
    pub(super) fn go_on(mut self: Box<Self>, out: &mut Out) -> Result<Part<Box<Self>>> {
        let size_bytes = self.new.1.record.size_bytes;
        let mut diff = match self.diff.take() {
            Some(diff) => diff,
            None => {
                if self.old.1.record.size_bytes != size_bytes {
                    self.touched = true;
                    let size = StreamItem::Size(size_bytes);
                    out.put_of(&self.object, &size);
                }
                self.diff()?
            }
        };
        let mut run = Run::default();
        loop {
            let item = match self.pending.take() {
                Some(item) => item,
                None => match diff.next().transpose()? {
                    Some(item) => item,
                    None => break,
                },
            };
            let number = block_number(b"", &item.key)?;
            let offset = number * BLOCK_BYTES;
            let is_same = trimmed(item.before.as_ref()) == trimmed(item.after.as_ref());
            if is_same && item.before.is_some() == item.after.is_some() || offset >= size_bytes {
                continue;
            }
            if !run.takes(offset) || item.after.is_none() {
                run.put(&self.object, out);
                if out.is_full() {
                    (self.pending, self.diff) = (Some(item), Some(diff));
                    return Ok(Part::Rest(self));
                }
            }
            self.touched = true;
            match &item.after {
                Some(block) => run.add(offset, block, size_bytes),
                None => {
                    let len = BLOCK_BYTES.min(size_bytes - offset);
                    let hole = StreamItem::Hole { offset, len };
                    out.put_of(&self.object, &hole);
                }
            }
        }
        run.put(&self.object, out);
        let both = (self.old, self.new);
        let completion = Completion::of_changed(self.object, both, self.touched);
        Ok(Part::Completion(completion))
    }
}
