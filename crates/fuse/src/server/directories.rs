//! Open directories, and the answers to READDIR and READDIRPLUS: which entries they have, and which
//! entries come with attributes.

use std::cell::Cell;
use std::collections::HashMap;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, OnceLock};

use parking_lot::Mutex;
use ramet_fs::{Attr, ControlState, DirEntry, DirStream, Error, Ino, Kind, Result, Volume};

use crate::cache::first_entry_policy::SHORT;
use crate::cache::listing_policies::ListingPolicies;
use crate::cache::prefetch::{Listing, Prefetch};
use crate::cache::readdirplus_policy::Choice;
use crate::protocol::negotiate::Agreed;
use crate::protocol::{Answer, Dirents, FileHandle, Header, Reply, answer};
use crate::server::prefetcher::Prefetcher;

/// The directories that the kernel has open.
pub(crate) struct Directories {
    /// Declared before the volume, because open directories hold inodes of it and must be dropped
    /// first.
    open: Mutex<HashMap<u64, OpenDir>>,
    volume: Arc<Volume>,
    next: AtomicU64,
    prefetch: Arc<Prefetch>,
    agreed: Arc<OnceLock<Agreed>>,
    policies: ListingPolicies,
}

/// A directory that the kernel has open.
#[derive(Clone)]
struct OpenDir {
    stream: Arc<DirStream>,
    /// Control calls on it that are under way.
    controls: Arc<ControlState>,
}

impl Directories {
    pub(crate) fn new(
        volume: Arc<Volume>,
        prefetch: Arc<Prefetch>,
        agreed: Arc<OnceLock<Agreed>>,
    ) -> Self {
        Self {
            open: Mutex::default(),
            volume,
            next: AtomicU64::new(1),
            prefetch,
            agreed,
            policies: ListingPolicies::default(),
        }
    }

    /// The policies for listings, if the server chooses which attributes come with them.
    pub(crate) fn policies(&self) -> Option<&ListingPolicies> {
        let agreed = self.agreed.get()?;
        (!agreed.kernel_chooses_attributes()).then_some(&self.policies)
    }

    /// Control calls that are under way on an open directory.
    pub(crate) fn controls(&self, fh: FileHandle) -> Option<Arc<ControlState>> {
        self.find(fh).ok().map(|open| open.controls)
    }

    fn find(&self, fh: FileHandle) -> Result<OpenDir> {
        let open = self.open.lock().get(&fh.0).cloned();
        open.ok_or(Error::Stale)
    }

    /// The answer to READDIR.
    pub(crate) fn answer_readdir(
        &self,
        fh: FileHandle,
        offset: u64,
        room: &mut [u8],
    ) -> Answer<Reply> {
        if let Some(policies) = self.policies() {
            policies.first_entry.goes_on(fh.0);
        }
        let mut entries = Dirents::new(room);
        self.read(fh, offset, |entry| entries.push(entry))?;
        Ok(Reply::room(entries.len()))
    }

    /// The answer to READDIRPLUS. `prefetcher` sends files that are due.
    pub(crate) fn answer_readdirplus(
        &self,
        header: &Header,
        (fh, offset): (FileHandle, u64),
        room: &mut [u8],
        prefetcher: &Prefetcher,
    ) -> Answer<Reply> {
        let mut entries = Dirents::new(room);
        let Some(policies) = self.policies() else {
            let push = |entry: &DirEntry, attr: Option<&_>| entries.push_plus(entry, attr);
            self.read_plus((fh, header.pid), offset, prefetcher, |_| true, push)?;
            return Ok(Reply::room(entries.len()));
        };
        let (thread, dir) = (header.pid, header.node);
        let begins = offset == 0;
        if !begins {
            policies.first_entry.goes_on(fh.0);
        }
        let is_short = begins && policies.first_entry.wants_first_only(thread, dir);
        let (most, mut choice) = if is_short {
            (SHORT, Choice::All)
        } else {
            (usize::MAX, policies.attributes.choose(thread, dir))
        };
        let count = Cell::new(0);
        let wants = |entry: &DirEntry| count.get() < most && choice.wants(entry.kind);
        let listed = self.read_plus((fh, thread), offset, prefetcher, wants, |entry, attr| {
            let taken = count.get() < most && entries.push_plus(entry, attr);
            count.set(count.get() + usize::from(taken));
            taken
        });
        if begins {
            policies.first_entry.began(thread, dir, fh.0, count.get());
        }
        listed.map(|()| Reply::room(entries.len()))
    }

    pub(crate) fn open(&self, node: Ino) -> Answer<FileHandle> {
        let stream = answer(self.volume.directories().open(node))?;
        let fh = self.next.fetch_add(1, Ordering::Relaxed);
        let open = OpenDir {
            stream: Arc::new(stream),
            controls: Arc::default(),
        };
        self.open.lock().insert(fh, open);
        Ok(FileHandle(fh))
    }

    /// Reads entries behind the cookie `offset`, as long as `take` takes them.
    fn read(&self, fh: FileHandle, offset: u64, take: impl FnMut(&DirEntry) -> bool) -> Answer<()> {
        let stream = answer(self.find(fh))?.stream;
        answer(self.volume.directories().read(&stream, offset, take))
    }

    /// Reads entries for a thread, with the attributes of the entries that `wants` chooses. Entries
    /// with attributes count as looked up, so the kernel must hear of them even if there is an
    /// error later; the kernel then asks again.
    fn read_plus(
        &self,
        (fh, thread): (FileHandle, u32),
        offset: u64,
        prefetcher: &Prefetcher,
        wants: impl FnMut(&DirEntry) -> bool,
        mut take: impl FnMut(&DirEntry, Option<&Attr>) -> bool,
    ) -> Answer<()> {
        let stream = answer(self.find(fh))?.stream;
        let mut any = false;
        let (volume, prefetch) = (&self.volume, &self.prefetch);
        let each = |entry: &DirEntry, attr: Option<&Attr>| {
            let taken = take(entry, attr);
            any |= taken;
            if taken && entry.kind == Kind::Directory && !matches!(&*entry.name, b"." | b"..") {
                prefetch.note_directory(Listing(fh.0), thread);
            }
            taken
        };
        let first = |attr: &Attr| {
            if attr.kind == Kind::Regular {
                prefetch.note_file(Listing(fh.0), thread, attr.ino, attr.size_bytes);
            }
        };
        prefetcher.send_due(prefetch.continue_listing(Listing(fh.0), thread));
        let read = volume
            .directories()
            .read_choosing(&stream, offset, wants, each, first);
        if any { Ok(()) } else { answer(read) }
    }

    pub(crate) fn close(&self, fh: FileHandle) {
        if let Some(policies) = self.policies() {
            policies.first_entry.closed(fh.0);
        }
        let open = self.open.lock().remove(&fh.0);
        if let Some(OpenDir { stream, .. }) = open {
            self.volume.directories().close(stream);
        }
    }
}
