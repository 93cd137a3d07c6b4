//! The answers to READDIR and READDIRPLUS: which entries they have, and which entries come with
//! attributes.
//!
//! A directory is opened without a request, so nothing is held for an open one. The kernel keeps
//! the listings that it gets (`cache/kept_listings.rs`), and looks up a name that came without
//! attributes when a program wants them.

use std::cell::Cell;
use std::sync::Arc;

use ramet_fs::{Attr, DirEntry, Ino, Kind, Volume};

use crate::cache::first_entry_policy::SHORT;
use crate::cache::kept_listings::KeptListings;
use crate::cache::listing_policies::ListingPolicies;
use crate::cache::prefetch::{Listing, Prefetch};
use crate::protocol::{Answer, Dirents, Header, Reply, answer};
use crate::server::prefetcher::Prefetcher;

/// The directories of a volume, as the kernel reads them.
pub(crate) struct Directories {
    volume: Arc<Volume>,
    prefetch: Arc<Prefetch>,
    kept: Arc<KeptListings>,
    pub(super) policies: ListingPolicies,
}

/// The reader of a directory, at one of its questions.
struct Reader {
    dir: Ino,
    thread: u32,
    listing: Listing,
    cookie: u64,
}

impl Directories {
    pub(crate) fn new(
        volume: Arc<Volume>,
        prefetch: Arc<Prefetch>,
        kept: Arc<KeptListings>,
    ) -> Self {
        Self {
            volume,
            prefetch,
            kept,
            policies: ListingPolicies::default(),
        }
    }

    /// The answer to READDIR.
    pub(crate) fn answer_readdir(
        &self,
        header: &Header,
        offset: u64,
        room: &mut [u8],
    ) -> Answer<Reply> {
        let dir = header.node;
        self.kept.note(dir, offset == 0);
        let mut entries = Dirents::new(room);
        let read = self
            .volume
            .directories()
            .read(dir, offset, |entry| entries.push(entry));
        answer(read)?;
        Ok(Reply::room(entries.len()))
    }

    /// The answer to READDIRPLUS. `prefetcher` sends files that are due.
    pub(crate) fn answer_readdirplus(
        &self,
        header: &Header,
        offset: u64,
        room: &mut [u8],
        prefetcher: &Prefetcher,
    ) -> Answer<Reply> {
        let (dir, thread, begins) = (header.node, header.pid, offset == 0);
        let reader = Reader {
            dir,
            thread,
            listing: Listing(self.kept.note(dir, begins).into()),
            cookie: offset,
        };
        let first_entry = &self.policies.first_entry;
        if !begins {
            first_entry.goes_on(thread, dir);
        }
        let is_short = begins && first_entry.wants_first_only(thread, dir);
        let most = if is_short { SHORT } else { usize::MAX };
        let mut choice = self.policies.attributes.choose(thread, dir);
        let mut entries = Dirents::new(room);
        let (count, mut is_partial) = (Cell::new(0), false);
        let wants = |entry: &DirEntry| count.get() < most && choice.wants(entry.kind);
        let listed = self.read_plus(&reader, prefetcher, wants, |entry, attr| {
            let taken = count.get() < most && entries.push_plus(entry, attr);
            count.set(count.get() + usize::from(taken));
            is_partial |= taken && attr.is_none();
            taken
        });
        if is_partial {
            self.kept.note_partial(dir);
        }
        if begins {
            first_entry.began(thread, dir, count.get());
        }
        listed.map(|()| Reply::room(entries.len()))
    }

    /// Reads entries, with the attributes of the entries that `wants` chooses. Entries with
    /// attributes count as looked up, so the kernel must hear of them even if there is an error
    /// later; the kernel then asks again.
    fn read_plus(
        &self,
        reader: &Reader,
        prefetcher: &Prefetcher,
        wants: impl FnMut(&DirEntry) -> bool,
        mut take: impl FnMut(&DirEntry, Option<&Attr>) -> bool,
    ) -> Answer<()> {
        let mut any = false;
        let (listing, thread) = (reader.listing, reader.thread);
        let prefetch = &self.prefetch;
        let each = |entry: &DirEntry, attr: Option<&Attr>| {
            let taken = take(entry, attr);
            any |= taken;
            if taken && entry.kind == Kind::Directory && !matches!(&*entry.name, b"." | b"..") {
                prefetch.note_directory(listing, thread);
            }
            taken
        };
        let first = |attr: &Attr| {
            if attr.kind == Kind::Regular {
                prefetch.note_file(listing, thread, attr.ino, attr.size_bytes);
            }
        };
        prefetcher.send_due(prefetch.continue_listing(listing, thread));
        let directories = self.volume.directories();
        let read = directories.read_choosing(reader.dir, reader.cookie, wants, each, first);
        if any { Ok(()) } else { answer(read) }
    }
}
