//! Counts of the objects in frames, and digests of them by path.
//!
//! The digest of an object covers kind, size, times, target, device and contents; that of a
//! privileged user also owner, mode and extended attributes, which others cannot all give. Blocks of
//! zeros count as holes do. Two trees are equal when each path has the same digest in both.

use std::collections::HashMap;

use ramet_block::hash;
use ramet_fs::{BLOCK_BYTES, ImportBody, ImportCounts, ImportItem, Items, Result};

/// See the module.
pub struct Tally {
    pub counts: ImportCounts,
    /// Path of the last object.
    last: Vec<u8>,
    digests: Option<Digests>,
}

struct Digests {
    is_privileged: bool,
    of_paths: HashMap<u64, u64>,
}

fn mix(parts: &[u64]) -> u64 {
    let bytes: Vec<u8> = parts.iter().flat_map(|part| part.to_le_bytes()).collect();
    hash(&bytes)
}

impl Tally {
    /// An empty tally; with digests, if it is to be compared.
    pub fn new(digests: Option<bool>) -> Tally {
        Tally {
            counts: ImportCounts::default(),
            last: Vec::new(),
            digests: digests.map(|is_privileged| Digests {
                is_privileged,
                of_paths: HashMap::new(),
            }),
        }
    }

    /// Path of the last object.
    pub fn last(&self) -> &[u8] {
        &self.last
    }

    /// Objects that were counted.
    pub fn objects(&self) -> u64 {
        let counts = &self.counts;
        counts.files + counts.directories + counts.symlinks + counts.specials + counts.links
    }

    /// Takes the items of a frame.
    ///
    /// # Errors
    /// The frame is none.
    pub fn take(&mut self, frame: &[u8]) -> Result<()> {
        let mut items = Items::of_frame(frame);
        while let Some(item) = items.next_item()? {
            self.take_item(&item);
        }
        Ok(())
    }

    fn take_item(&mut self, item: &ImportItem<'_>) {
        self.count(item);
        if let Some(digests) = &mut self.digests {
            digests.take(&self.last, item);
        }
    }

    /// Takes the items of a frame of a tree that is read again, and hands the path of each object
    /// with another digest in `source` to `tell` when the next object comes.
    ///
    /// # Errors
    /// The frame is none.
    pub fn compare(
        &mut self,
        frame: &[u8],
        source: &Tally,
        tell: &mut dyn FnMut(&[u8]),
    ) -> Result<()> {
        let mut items = Items::of_frame(frame);
        while let Some(item) = items.next_item()? {
            if matches!(item, ImportItem::Object { .. } | ImportItem::Link { .. }) {
                self.compare_last(source, tell);
            }
            self.take_item(&item);
        }
        Ok(())
    }

    /// Hands the path of the last object to `tell`, if it has another digest in `source`.
    pub fn compare_last(&self, source: &Tally, tell: &mut dyn FnMut(&[u8])) {
        let path = hash(&self.last);
        let of = |tally: &Tally| {
            let digests = tally.digests.as_ref();
            digests.and_then(|digests| digests.of_paths.get(&path).copied())
        };
        if self.objects() > 0 && of(self) != of(source) {
            tell(&self.last);
        }
    }

    fn count(&mut self, item: &ImportItem<'_>) {
        let counts = &mut self.counts;
        match item {
            ImportItem::Object { path, body, .. } => {
                self.last.clear();
                self.last.extend_from_slice(path);
                match body {
                    ImportBody::Directory => counts.directories += 1,
                    ImportBody::File(_) => counts.files += 1,
                    ImportBody::Symlink(_) => counts.symlinks += 1,
                    ImportBody::Special(_) => counts.specials += 1,
                }
            }
            ImportItem::Link { path, .. } => {
                self.last.clear();
                self.last.extend_from_slice(path);
                counts.links += 1;
            }
            ImportItem::Xattr { .. } => counts.xattrs += 1,
            ImportItem::Data { bytes, .. } => counts.bytes += bytes.len() as u64,
        }
    }

    /// The number of paths that have another digest in `other`, or none.
    pub fn differences(&self, other: &Tally) -> usize {
        let (Some(ours), Some(theirs)) = (&self.digests, &other.digests) else {
            return 0;
        };
        let is_new = |path: &&u64| !ours.of_paths.contains_key(path);
        let more = theirs.of_paths.keys().filter(is_new).count();
        let differs = |(path, digest): &(&u64, &u64)| theirs.of_paths.get(path) != Some(digest);
        more + ours.of_paths.iter().filter(differs).count()
    }
}

impl Digests {
    fn take(&mut self, last: &[u8], item: &ImportItem<'_>) {
        let digest = match *item {
            ImportItem::Object { path, attr, body } => {
                let body = match body {
                    ImportBody::Directory => 0,
                    ImportBody::File(size_bytes) => size_bytes,
                    ImportBody::Symlink(target) => hash(target),
                    ImportBody::Special(device) => device.into(),
                };
                let kind = attr.mode & 0o170_000;
                let mode = if self.is_privileged { attr.mode } else { kind };
                let owner = match self.is_privileged {
                    true => [attr.uid, attr.gid],
                    false => [0, 0],
                };
                let (secs, nanos) = (attr.mtime.secs.cast_unsigned(), attr.mtime.nanos);
                let of_all = mix(&[
                    mode.into(),
                    owner[0].into(),
                    owner[1].into(),
                    secs,
                    nanos.into(),
                    body,
                ]);
                self.of_paths.insert(hash(path), of_all);
                return;
            }
            ImportItem::Link { path, first } => {
                let first = self.of_paths.get(&hash(first)).copied();
                self.of_paths.insert(hash(path), first.unwrap_or_default());
                return;
            }
            ImportItem::Xattr { .. } if !self.is_privileged => 0,
            ImportItem::Xattr { name, value } => mix(&[hash(name), hash(value)]),
            ImportItem::Data { offset, bytes } => of_blocks(offset, bytes),
        };
        let of_last = self.of_paths.entry(hash(last)).or_default();
        *of_last = of_last.wrapping_add(digest);
    }
}

/// The sum over all blocks that are no zeros.
fn of_blocks(offset: u64, bytes: &[u8]) -> u64 {
    const BLOCK: usize = BLOCK_BYTES as usize;
    let blocks = bytes.chunks(BLOCK).zip(offset / BLOCK_BYTES..);
    blocks.fold(0, |sum: u64, (block, number)| {
        let len = block.iter().rposition(|&byte| byte != 0);
        let digest = len.map_or(0, |len| mix(&[hash(&block[..=len]), number]));
        sum.wrapping_add(digest)
    })
}
