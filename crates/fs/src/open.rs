//! Opening files, and closing them.

use std::sync::Arc;
use std::sync::atomic::Ordering;

use ramet_betree::Batch;

use crate::error::Result;
use crate::inode::{Ino, Inode, Loc};
use crate::keys;
use crate::record::Kind;
use crate::volume::{RECORDS_BYTES, Volume};

/// Longest file whose contents are shown to whoever opens it.
const SHOWN_BYTES_MAX: u64 = 64 * 1024;

/// What a file is opened for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Access {
    /// Reading, or executing.
    Read,
    /// Writing, perhaps reading as well.
    Write,
}

/// Whether a file may be shown. Held while it is, and over what would change it without opening it.
#[derive(Default)]
pub(crate) struct Gate {
    /// How often it is open for writing.
    writers: u32,
    /// Whether it was shown since it came into memory.
    is_shown: bool,
}

impl Volume {
    /// Counts an open, so that the contents outlive the last name until [`Volume::release`].
    ///
    /// # Errors
    /// `Stale` when the inode lost its last name before.
    pub fn open_inode(&self, ino: Ino, access: Access) -> Result<()> {
        self.open_showing(ino, access, &mut |_| {})
    }

    /// The same, and hands the contents of a small file that is opened to be read to `show`, once while the inode is in memory.
    /// Nobody has the file open then, and nothing changes it until `show` is back: a cache that it fills has no other
    /// request of this file under way.
    ///
    /// # Errors
    /// As [`Volume::open_inode`]. That the contents cannot be read is for whoever reads them.
    pub fn open_showing(
        &self,
        ino: Ino,
        access: Access,
        show: &mut dyn FnMut(&[u8]),
    ) -> Result<()> {
        let inode = self.inode(ino)?;
        let mut gate = inode.gate.lock();
        let is_first = inode.opens.load(Ordering::SeqCst) == 0;
        if access == Access::Read && is_first && gate.writers == 0 && !gate.is_shown {
            gate.is_shown = true;
            self.show(&inode, show);
        }
        let _record = inode.state.read();
        // Structural changes look at the open files with the topology held for writing.
        let topology = self.topology.read();
        if !matches!(*inode.loc.read(), Loc::Orphan) {
            topology.path(&inode)?;
        }
        self.table.opened(&inode);
        gate.count(access);
        Ok(())
    }

    fn show(&self, inode: &Arc<Inode>, show: &mut dyn FnMut(&[u8])) {
        let size_bytes = inode.state.read().size_bytes;
        if inode.kind != Kind::Regular || size_bytes == 0 || size_bytes > SHOWN_BYTES_MAX {
            return;
        }
        let len = u32::try_from(size_bytes).expect("a small file");
        match self.read(inode.ino, 0, len) {
            Ok(contents) => show(&contents),
            Err(error) => tracing::debug!(%error, "not shown"),
        }
    }

    /// Counts a close. The last one of a file without a name frees its contents.
    ///
    /// # Errors
    /// Those of the tree: the contents are then freed when the volume is opened the next time.
    pub fn release(&self, ino: Ino, access: Access) -> Result<()> {
        let inode = self.inode(ino)?;
        if access == Access::Write {
            let mut gate = inode.gate.lock();
            gate.writers = gate.writers.saturating_sub(1);
        }
        if !self.table.closed(&inode) {
            return Ok(());
        }
        let is_orphan = {
            // Whoever saw it open and is taking its name away has one of these.
            let (_record, _topology) = (inode.state.read(), self.topology.read());
            matches!(*inode.loc.read(), Loc::Orphan)
        };
        if is_orphan {
            self.free_orphan(&inode)
        } else {
            Ok(())
        }
    }

    fn free_orphan(&self, inode: &Arc<Inode>) -> Result<()> {
        self.tree.admit(RECORDS_BYTES)?;
        let _record = inode.state.write();
        if inode.opens.load(Ordering::SeqCst) > 0 || !matches!(*inode.loc.read(), Loc::Orphan) {
            return Ok(());
        }
        let mut batch = Batch::new();
        for index in [keys::META, keys::DATA] {
            batch.delete_prefix(keys::range(index, &keys::orphan(inode.ino)));
        }
        self.tree.apply(batch)?;
        *inode.loc.write() = Loc::Gone;
        Ok(())
    }
}

impl Gate {
    pub(crate) fn count(&mut self, access: Access) {
        self.writers += u32::from(access == Access::Write);
    }
}
