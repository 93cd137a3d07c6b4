//! Answers to READDIRPLUS: which entries they have, and which entries come with attributes.

use std::cell::Cell;

use ramet_fs::DirEntry;

use crate::cache::first_entry_policy::SHORT;
use crate::cache::readdirplus_policy::Choice;
use crate::protocol::{Answer, Dirents, FileHandle, Header, Reply};
use crate::server::server::Server;

impl Server {
    pub(super) fn answer_readdirplus(
        &self,
        header: &Header,
        (fh, offset): (FileHandle, u64),
        room: &mut [u8],
    ) -> Answer<Reply> {
        let mut entries = Dirents::new(room);
        let Some(policies) = self.listing_policies() else {
            let push = |entry: &DirEntry, attr: Option<&_>| entries.push_plus(entry, attr);
            self.read_dir_plus((fh, header.pid), offset, |_| true, push)?;
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
        let listed = self.read_dir_plus((fh, thread), offset, wants, |entry, attr| {
            let taken = count.get() < most && entries.push_plus(entry, attr);
            count.set(count.get() + usize::from(taken));
            taken
        });
        if begins {
            policies.first_entry.began(thread, dir, fh.0, count.get());
        }
        listed.map(|()| Reply::room(entries.len()))
    }
}
