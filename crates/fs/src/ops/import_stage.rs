//! The stage of an import: a tree that grows in the orphan area, where no name leads.
//!
//! Nobody but the import knows the tree, so there are no inodes in memory and no locks: items become
//! keys of the tree directly, in batches of many objects. Records of directories stay in memory
//! until they are many, as each name takes a slot of its parent. Inode numbers are given when names are
//! first shown, as in a clone.
//!
//! Names that ascend in the order of keys are new without a look at the tree. This is the order of
//! a walk that goes down at each directory, through sorted names.

use std::collections::HashMap;
use std::sync::Arc;

use bytes::Bytes;
use ramet_betree::Batch;

use crate::error::{Error, Result};
use crate::format::acl::Acl;
use crate::format::blocks::{BLOCK, BLOCK_BYTES, FILE_BYTES_MAX, blocks_of};
use crate::format::import::{ImportAttr, ImportBody, ImportItem, Items};
use crate::format::keys::{self, Orphan};
use crate::format::name::{check_names, split_path};
use crate::format::record::{
    Entry, FLAG_ACL, FLAG_SPARSE, FLAG_XATTRS, Kind, LinkEntry, Record, S_IFMT, Time,
};
use crate::format::slots::{SLOTS_MAX, Slot};
use crate::namespace::numbers::Numbers;
use crate::namespace::resolve::Namespace;
use crate::namespace::slot_index::names_of;
use crate::namespace::transaction::{RECORDS_BYTES, Transaction, lock_states};
use crate::ops::access::{Caller, Capabilities};
use crate::ops::acl::{PERMISSION_BITS, flag_of};
use crate::ops::allocation::{Allocation, CHUNK_BLOCKS};
use crate::ops::contents::move_contents;
use crate::ops::import_blocks::{Contents, SETTLED_BYTES};
use crate::ops::import_settlers::Settlers;
use crate::ops::xattr::{XATTR_BYTES_MAX, check as check_xattr, flags_of};

/// Bytes of one batch of records.
const BATCH_BYTES: usize = 512 << 10;
/// Directories whose records are kept in memory, and bytes of their paths.
const DIRS_MAX: usize = 4096;
const DIR_PATHS_BYTES: usize = 1 << 20;

/// The objects that an import has made.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct ImportCounts {
    /// Files.
    pub files: u64,
    /// Directories, with the top.
    pub directories: u64,
    /// Symbolic links.
    pub symlinks: u64,
    /// Pipes, sockets and devices.
    pub specials: u64,
    /// Further names of files.
    pub links: u64,
    /// Bytes of contents, without holes.
    pub bytes: u64,
    /// Extended attributes.
    pub xattrs: u64,
    /// Extended attributes that the caller may not set, or that the object cannot have.
    pub refused_xattrs: u64,
}

impl ImportCounts {
    /// Number of the counts.
    pub const FIELDS: usize = 8;

    /// The counts in the order of the fields.
    #[must_use]
    pub fn fields(&self) -> [u64; Self::FIELDS] {
        [
            self.files,
            self.directories,
            self.symlinks,
            self.specials,
            self.links,
            self.bytes,
            self.xattrs,
            self.refused_xattrs,
        ]
    }

    /// The counts from those of [`ImportCounts::fields`].
    #[must_use]
    pub fn of_fields(fields: [u64; Self::FIELDS]) -> Self {
        let [
            files,
            directories,
            symlinks,
            specials,
            links,
            bytes,
            xattrs,
            refused_xattrs,
        ] = fields;
        Self {
            files,
            directories,
            symlinks,
            specials,
            links,
            bytes,
            xattrs,
            refused_xattrs,
        }
    }
}

/// A directory of the tree.
pub(crate) struct Dir {
    pub(crate) record: Record,
    /// The tree has another record, or none.
    is_dirty: bool,
}

/// The place of the record of an object that is open.
enum Place {
    /// A directory, by its path; the top has an empty one.
    Directory(Bytes),
    /// The key of the record.
    Record(Bytes),
}

/// The last object, which attributes and contents go to.
struct Open {
    place: Place,
    /// Unused for a directory.
    record: Record,
    /// Path of the contents.
    path: Bytes,
    is_shared: bool,
    /// The block behind the last one that has come.
    next_block: u64,
    /// The last chunk of the map, once the file has a hole.
    map: Option<Allocation>,
}

/// See the module.
pub(crate) struct Stage {
    namespace: Arc<Namespace>,
    numbers: Arc<Numbers>,
    caller: Caller,
    /// Path of the top.
    path: Bytes,
    /// Flags that every object gets.
    flags: u16,
    now: Time,
    top: Dir,
    dirs: HashMap<Bytes, Dir>,
    dir_paths_bytes: usize,
    batch: Batch,
    batch_bytes: usize,
    contents: Contents,
    /// Bytes of the frames that blocks are parts of.
    frames_bytes: usize,
    /// The greatest path that was made.
    highest: Bytes,
    open: Option<Open>,
    counts: ImportCounts,
}

impl Stage {
    /// An empty tree at `orphan`, made by `caller`. Its objects get `flags`.
    ///
    /// # Errors
    /// Those of the tree.
    pub(crate) fn new(
        (namespace, numbers): (&Arc<Namespace>, &Arc<Numbers>),
        settlers: &Arc<Settlers>,
        caller: Caller,
        orphan: Orphan,
        flags: u16,
        now: Time,
    ) -> Result<Self> {
        let mode = Kind::Directory.mode_bits() | 0o755;
        let mut record = Record::new(mode, caller.uid, caller.gid, now);
        record.flags |= flags;
        record.birth = numbers.generation()?;
        Ok(Self {
            namespace: Arc::clone(namespace),
            numbers: Arc::clone(numbers),
            caller,
            path: keys::orphan(orphan),
            flags,
            now,
            top: Dir {
                record,
                is_dirty: false,
            },
            dirs: HashMap::new(),
            dir_paths_bytes: 0,
            batch: Batch::new(),
            batch_bytes: 0,
            contents: Contents::new(&namespace.tree, settlers),
            frames_bytes: 0,
            highest: Bytes::new(),
            open: None,
            counts: ImportCounts {
                directories: 1,
                ..ImportCounts::default()
            },
        })
    }

    /// Path of the top in the orphan area.
    pub(crate) fn path(&self) -> &Bytes {
        &self.path
    }

    /// The top, after [`Stage::finish`], and the objects of the tree.
    pub(crate) fn result(&self) -> (&Dir, ImportCounts) {
        (&self.top, self.counts)
    }

    /// Takes the items of a whole frame.
    ///
    /// # Errors
    /// `Invalid` for an item out of place, `Exists`, `NotFound`, `NotDirectory`, `NameTooLong`,
    /// `NotPermitted`, and those of the tree. The tree cannot go on then.
    pub(crate) fn take_frame(&mut self, frame: &Bytes) -> Result<()> {
        let mut items = Items::of_frame(frame);
        while let Some(item) = items.next_item()? {
            match item {
                ImportItem::Object { path, attr, body } => self.add_object(path, &attr, body)?,
                ImportItem::Link { path, first } => self.add_link(path, first)?,
                ImportItem::Xattr { name, value } => self.add_xattr(name, value)?,
                ImportItem::Data { offset, bytes } => self.add_data(offset, frame, bytes)?,
            }
            if self.batch_bytes >= BATCH_BYTES {
                self.apply()?;
            }
        }
        self.frames_bytes += frame.len();
        if self.frames_bytes >= SETTLED_BYTES {
            self.settle()?;
        }
        Ok(())
    }

    /// Hands everything to the tree.
    ///
    /// # Errors
    /// Those of the tree.
    pub(crate) fn finish(&mut self) -> Result<()> {
        self.close()?;
        self.settle_all()?;
        self.write_dirs()
    }

    fn put(&mut self, key: Bytes, value: Bytes) {
        self.batch_bytes += key.len() + value.len() + 64;
        self.batch.put(key, value);
    }

    fn apply(&mut self) -> Result<()> {
        let batch = std::mem::take(&mut self.batch);
        let bytes = std::mem::take(&mut self.batch_bytes);
        if !batch.is_empty() {
            self.namespace.tree.admit(bytes)?;
            self.namespace.tree.apply(batch)?;
        }
        Ok(())
    }

    fn settle(&mut self) -> Result<()> {
        self.frames_bytes = 0;
        self.contents.settle()?;
        self.apply()
    }

    /// Settles, and waits until the tree has all blocks.
    fn settle_all(&mut self) -> Result<()> {
        self.settle()?;
        self.contents.finish()
    }

    /// Writes the records of directories that have changed, and lets go of all of them.
    fn write_dirs(&mut self) -> Result<()> {
        let dirs = std::mem::take(&mut self.dirs);
        self.dir_paths_bytes = 0;
        for (path, dir) in dirs.into_iter().filter(|(_, dir)| dir.is_dirty) {
            let (parent, name) = split_path(&path);
            let key = keys::entry(&self.key_path(parent), name);
            self.put(key, dir.record.encode());
            if self.batch_bytes >= BATCH_BYTES {
                self.apply()?;
            }
        }
        self.apply()
    }

    /// Path of the object at `path` below the top.
    fn key_path(&self, path: &[u8]) -> Bytes {
        let mut key = Vec::with_capacity(self.path.len() + path.len() + 64);
        key.extend_from_slice(&self.path);
        for name in path.split(|&byte| byte == b'/') {
            if !path.is_empty() {
                keys::push_child(&mut key, name);
            }
        }
        key.into()
    }

    /// Gives a new name a slot in its directory.
    fn take_slot(&mut self, path: &[u8]) -> Result<Slot> {
        let (parent, name) = split_path(path);
        if self.dir(parent)?.record.is_being_indexed() {
            self.make_index(parent)?;
        }
        let dir = self.dir(parent)?;
        if dir.record.next_slot >= SLOTS_MAX {
            return Err(Error::TooManyLinks);
        }
        let slot = Slot(dir.record.next_slot);
        dir.record.next_slot += 1;
        dir.is_dirty = true;
        if dir.record.has_slot_index() {
            let key = keys::slot(&self.key_path(parent), slot);
            self.put(key, Bytes::copy_from_slice(name));
        }
        Ok(slot)
    }

    /// Makes the slot index of a directory, which takes a slot for that. No object is open.
    fn make_index(&mut self, dir: &[u8]) -> Result<()> {
        self.write_dirs()?;
        let at = self.key_path(dir);
        for (slot, name) in names_of(&self.namespace.tree.snapshot(), &at)? {
            self.put(keys::slot(&at, slot), name);
            if self.batch_bytes >= BATCH_BYTES {
                self.apply()?;
            }
        }
        let dir = self.dir(dir)?;
        dir.record.next_slot += 1;
        dir.is_dirty = true;
        Ok(())
    }

    /// The entry at a path below the top, as the tree has it.
    fn entry(&mut self, path: &[u8]) -> Result<Option<Entry>> {
        self.apply()?;
        let (parent, name) = split_path(path);
        let key = keys::entry(&self.key_path(parent), name);
        let found = self.namespace.tree.get(&key)?;
        found.as_ref().map(Entry::decode).transpose()
    }

    /// The directory at a path.
    fn dir(&mut self, path: &[u8]) -> Result<&mut Dir> {
        if path.is_empty() {
            return Ok(&mut self.top);
        }
        if !self.dirs.contains_key(path) {
            let dir = match self.entry(path)? {
                Some(Entry::Inode(record)) if record.kind() == Kind::Directory => Dir {
                    record,
                    is_dirty: false,
                },
                Some(_) => return Err(Error::NotDirectory),
                None => return Err(Error::NotFound),
            };
            self.keep_dir(Bytes::copy_from_slice(path), dir)?;
        }
        self.dirs.get_mut(path).ok_or(Error::NotFound)
    }

    fn keep_dir(&mut self, path: Bytes, dir: Dir) -> Result<()> {
        if self.dirs.len() >= DIRS_MAX || self.dir_paths_bytes >= DIR_PATHS_BYTES {
            self.write_dirs()?;
        }
        self.dir_paths_bytes += path.len();
        self.dirs.insert(path, dir);
        Ok(())
    }

    /// The record of a new object.
    fn record(&self, attr: &ImportAttr, body: ImportBody<'_>) -> Result<Record> {
        let kind = Kind::from_mode(attr.mode).ok_or(Error::Invalid("mode of an object"))?;
        let mode = attr.mode & (S_IFMT | 0o7777);
        let mut record = Record::new(mode, attr.uid, attr.gid, self.now);
        (record.atime, record.mtime) = (attr.atime, attr.mtime);
        record.flags |= self.flags;
        match (body, kind) {
            (ImportBody::Directory, Kind::Directory) => {}
            (ImportBody::File(size_bytes), Kind::Regular) if size_bytes <= FILE_BYTES_MAX => {
                record.size_bytes = size_bytes;
            }
            (ImportBody::File(_), Kind::Regular) => return Err(Error::TooBig),
            (ImportBody::Symlink(target), Kind::Symlink)
                if !target.is_empty() && !target.contains(&0) =>
            {
                record.target = Bytes::copy_from_slice(target);
                record.size_bytes = target.len() as u64;
            }
            (ImportBody::Special(device), Kind::CharDevice | Kind::BlockDevice) => {
                if !self.caller.capabilities.have(Capabilities::MKNOD) {
                    return Err(Error::NotPermitted);
                }
                record.rdev = device;
            }
            (ImportBody::Special(_), Kind::Fifo | Kind::Socket) => {}
            _ => return Err(Error::Invalid("kind of an object")),
        }
        self.caller.give(&mut record);
        Ok(record)
    }

    fn add_object(&mut self, path: &[u8], attr: &ImportAttr, body: ImportBody<'_>) -> Result<()> {
        self.close()?;
        let mut record = self.record(attr, body)?;
        let is_directory = body == ImportBody::Directory;
        if path.is_empty() && !is_directory {
            return Err(Error::Invalid("the top is no directory"));
        }
        let is_new = !path.is_empty() && self.takes_new_name(path, is_directory)?;
        if is_directory {
            return self.open_directory(path, record, is_new);
        }
        let slot = self.take_slot(path)?;
        (record.slot, record.birth) = (slot, self.numbers.generation()?);
        let (parent, name) = split_path(path);
        let dir = self.key_path(parent);
        let mut open = Open {
            place: Place::Record(keys::entry(&dir, name)),
            path: keys::child(&dir, name),
            record,
            is_shared: attr.has_names,
            next_block: 0,
            map: None,
        };
        if attr.has_names {
            let link = self.numbers.generation()?;
            open.record.slot = Slot::shared(link);
            open.path = keys::shared_inode(&self.path, link);
            open.place = Place::Record(keys::shared_record(&open.path));
            self.put_link((&dir, name), slot, (open.record.kind(), link));
        }
        match body {
            ImportBody::File(_) => self.counts.files += 1,
            ImportBody::Symlink(_) => self.counts.symlinks += 1,
            ImportBody::Special(_) | ImportBody::Directory => self.counts.specials += 1,
        }
        self.open = Some(open);
        Ok(())
    }

    /// Checks that a name can be made, and answers whether it is new: a directory may be there
    /// already, if a directory comes.
    fn takes_new_name(&mut self, path: &[u8], is_directory: bool) -> Result<bool> {
        let (parent, _) = split_path(path);
        check_names(path)?;
        self.dir(parent)?;
        let key_path = self.key_path(path);
        if key_path > self.highest {
            self.highest = key_path;
            return Ok(true);
        }
        // The tree may not have it yet.
        let is_kept = self.dirs.contains_key(path);
        match self.entry(path)? {
            _ if is_kept && is_directory => Ok(false),
            _ if is_kept => Err(Error::Exists),
            None => Ok(true),
            Some(Entry::Inode(record)) if is_directory && record.kind() == Kind::Directory => {
                Ok(false)
            }
            Some(_) => Err(Error::Exists),
        }
    }

    /// Makes a directory, or gives one new attributes.
    fn open_directory(&mut self, path: &[u8], mut record: Record, is_new: bool) -> Result<()> {
        let kept = Bytes::copy_from_slice(path);
        if is_new {
            record.slot = self.take_slot(path)?;
            record.birth = self.numbers.generation()?;
            let parent = self.dir(split_path(path).0)?;
            let nlink = &mut parent.record.nlink;
            *nlink = nlink.checked_add(1).ok_or(Error::TooManyLinks)?;
            parent.is_dirty = true;
            let is_dirty = true;
            let dir = Dir {
                record: record.clone(),
                is_dirty,
            };
            self.keep_dir(kept.clone(), dir)?;
            self.counts.directories += 1;
        } else {
            let dir = self.dir(path)?;
            let its = &mut dir.record;
            // The bits of a directory with a list are those of the list.
            let kept_bits = if its.has(FLAG_ACL) {
                PERMISSION_BITS
            } else {
                0
            };
            its.mode = record.mode & !kept_bits | its.mode & kept_bits;
            (its.uid, its.gid) = (record.uid, record.gid);
            (its.atime, its.mtime) = (record.atime, record.mtime);
            dir.is_dirty = true;
        }
        self.open = Some(Open {
            place: Place::Directory(kept),
            path: self.key_path(path),
            record,
            is_shared: false,
            next_block: 0,
            map: None,
        });
        Ok(())
    }

    /// Puts a name of a shared inode, in the directory and in the index.
    fn put_link(&mut self, (dir, name): (&[u8], &[u8]), slot: Slot, (kind, link): (Kind, u64)) {
        let entry = LinkEntry {
            kind,
            slot,
            link,
            pin: None,
        };
        self.put(keys::entry(dir, name), entry.encode());
        let index = keys::link(&self.path, dir, name);
        self.put(index, Bytes::copy_from_slice(&link.to_be_bytes()));
    }

    fn add_link(&mut self, path: &[u8], first: &[u8]) -> Result<()> {
        self.close()?;
        if path.is_empty() || first.is_empty() {
            return Err(Error::NotPermitted);
        }
        self.takes_new_name(path, false)?;
        check_names(first)?;
        let found = self.entry(first)?.ok_or(Error::NotFound)?;
        let link = match found {
            Entry::Link(entry) => entry.link,
            Entry::Inode(record) if record.kind() == Kind::Directory => {
                return Err(Error::NotPermitted);
            }
            Entry::Inode(record) => self.share(first, record)?,
            Entry::Deleted(_) => return Err(Error::NotFound),
        };
        let key = keys::shared_record(&keys::shared_inode(&self.path, link));
        let stored = self.namespace.tree.get(&key)?;
        let Some(Entry::Inode(mut record)) = stored.as_ref().map(Entry::decode).transpose()? else {
            return Err(Error::NotFound);
        };
        record.nlink = record.nlink.checked_add(1).ok_or(Error::TooManyLinks)?;
        self.put(key, record.encode());
        let slot = self.take_slot(path)?;
        let (parent, name) = split_path(path);
        let dir = self.key_path(parent);
        self.put_link((&dir, name), slot, (record.kind(), link));
        self.counts.links += 1;
        Ok(())
    }

    /// Makes the object at a path, which has one name, a shared inode. Answers its number.
    fn share(&mut self, path: &[u8], mut record: Record) -> Result<u64> {
        // The contents move.
        self.settle_all()?;
        let link = self.numbers.generation()?;
        let (from, to) = (self.key_path(path), keys::shared_inode(&self.path, link));
        let mut tx = Transaction::new(lock_states(&[]));
        move_contents(&mut tx, &record, &from, &to, None);
        self.batch = tx.batch;
        let slot = std::mem::replace(&mut record.slot, Slot::shared(link));
        self.put(keys::shared_record(&to), record.encode());
        let (parent, name) = split_path(path);
        let dir = self.key_path(parent);
        self.put_link((&dir, name), slot, (record.kind(), link));
        self.batch_bytes += 8 * 4096 + RECORDS_BYTES;
        self.apply()?;
        Ok(link)
    }

    /// The record of the open object, to be edited.
    fn open_record(&mut self) -> Result<&mut Record> {
        const NONE: Error = Error::Invalid("an attribute of no object");
        match self.open.as_ref().map(|open| &open.place) {
            Some(Place::Directory(path)) => {
                let path = path.clone();
                let dir = self.dir(&path)?;
                dir.is_dirty = true;
                Ok(&mut dir.record)
            }
            Some(Place::Record(_)) => self.open.as_mut().map(|open| &mut open.record).ok_or(NONE),
            None => Err(NONE),
        }
    }

    fn add_xattr(&mut self, name: &[u8], value: &[u8]) -> Result<()> {
        let kind = self.open_record()?.kind();
        let is_possible = check_xattr(name).is_ok() && value.len() <= XATTR_BYTES_MAX;
        if !is_possible || !self.caller.may_set_xattr(name, kind) {
            self.counts.refused_xattrs += 1;
            return Ok(());
        }
        if let Some(flag) = flag_of(name) {
            return self.add_list(name, value, (flag, kind));
        }
        self.open_record()?.flags |= flags_of(name);
        let key = self.xattr_key(name);
        self.put(key, Bytes::copy_from_slice(value));
        self.counts.xattrs += 1;
        Ok(())
    }

    fn xattr_key(&self, name: &[u8]) -> Bytes {
        let path = self.open.as_ref().map(|open| &open.path[..]);
        keys::xattr(path.unwrap_or_default(), name)
    }

    /// Gives the open object an access control list.
    fn add_list(&mut self, name: &[u8], value: &[u8], (flag, kind): (u16, Kind)) -> Result<()> {
        let has_list = kind == Kind::Directory || flag == FLAG_ACL && kind != Kind::Symlink;
        let Some(list) = Acl::decode(value).ok().filter(|_| has_list) else {
            self.counts.refused_xattrs += 1;
            return Ok(());
        };
        let key = self.xattr_key(name);
        let record = self.open_record()?;
        if flag == FLAG_ACL {
            record.mode = record.mode & !PERMISSION_BITS | list.mode_bits();
        }
        if flag == FLAG_ACL && list.is_mode() {
            if record.has(flag) {
                record.flags &= !flag;
                self.batch.delete(key);
            }
            return Ok(());
        }
        record.flags |= FLAG_XATTRS | flag;
        self.put(key, Bytes::from(list.encode()));
        self.counts.xattrs += 1;
        Ok(())
    }

    /// Takes contents of the open file, which are a part of `frame`.
    fn add_data(&mut self, offset: u64, frame: &Bytes, bytes: &[u8]) -> Result<()> {
        const MISPLACED: Error = Error::Invalid("data out of place");
        let open = self.open.as_mut().ok_or(MISPLACED)?;
        let end = offset.checked_add(bytes.len() as u64).ok_or(MISPLACED)?;
        let size_bytes = open.record.size_bytes;
        let (first, last) = (offset / BLOCK_BYTES, blocks_of(end));
        let is_whole = end.is_multiple_of(BLOCK_BYTES) || end == size_bytes;
        if open.record.kind() != Kind::Regular
            || bytes.is_empty()
            || !offset.is_multiple_of(BLOCK_BYTES)
            || !is_whole
            || first < open.next_block
            || end > size_bytes
        {
            return Err(MISPLACED);
        }
        if first > open.next_block {
            note_hole(open);
        }
        // A chunk of the map is stored when a block behind it comes: no more of the map is in
        // memory.
        if open.map.is_some() && open.next_block / CHUNK_BLOCKS != first / CHUNK_BLOCKS {
            self.put_map()?;
        }
        let open = self.open.as_mut().ok_or(MISPLACED)?;
        open.next_block = last;
        if let Some(map) = &mut open.map {
            open.record.blocks += map.set(first..last, true);
        }
        let keys_of_blocks = keys::blocks(&open.path);
        let is_shared = open.is_shared;
        let blocks = self.contents.of(is_shared);
        for (number, block) in (first..last).zip(bytes.chunks(BLOCK)) {
            blocks.push(keys::block(&keys_of_blocks, number), frame.slice_ref(block));
        }
        self.counts.bytes += bytes.len() as u64;
        if self.contents.of(is_shared).is_full() {
            self.contents.of(is_shared).settle()?;
        }
        Ok(())
    }

    /// Stores the chunks of the map of the open file that are in memory, if it has a map.
    fn put_map(&mut self) -> Result<()> {
        let Some(open) = &mut self.open else {
            return Ok(());
        };
        let Some(map) = open.map.as_mut().map(std::mem::take) else {
            return Ok(());
        };
        let (path, is_shared) = (open.path.clone(), open.is_shared);
        // Where names do not ascend, an ingest beside the stream may span the place of the chunk.
        self.contents.of(is_shared).finish()?;
        for (key, value) in map.entries(&path) {
            self.contents.of(is_shared).note_other(&key);
            self.put(key, value);
        }
        if self.batch_bytes >= BATCH_BYTES {
            self.apply()?;
        }
        Ok(())
    }

    /// Completes the open object: from here on it takes no attributes and no contents.
    fn close(&mut self) -> Result<()> {
        if let Some(open) = &mut self.open
            && matches!(open.place, Place::Record(_))
            && open.record.kind() == Kind::Regular
            && open.next_block < blocks_of(open.record.size_bytes)
        {
            note_hole(open);
        }
        self.put_map()?;
        let Some(open) = self.open.take() else {
            return Ok(());
        };
        if let Place::Record(key) = open.place {
            self.put(key, open.record.encode());
        }
        if open.map.is_some() {
            // An ingest of these blocks and of others behind them would replace the map.
            self.settle()?;
        }
        Ok(())
    }
}

/// Notes that a file has a hole behind the blocks that have come.
fn note_hole(open: &mut Open) {
    if open.map.is_none() {
        open.record.flags |= FLAG_SPARSE;
        open.record.blocks = open.next_block;
        open.map = Some(Allocation::without_holes(open.next_block));
    }
}
