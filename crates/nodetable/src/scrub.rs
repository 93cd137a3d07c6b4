//! Reading every page of a checkpoint again.

use std::collections::HashSet;

use ramet_block::PageRef;

use crate::error::Error;
use crate::free_map::FREE_MAP_SHAPE;
use crate::page::{Link, Shape};
use crate::record::SHAPE;
use crate::table::{NodeTable, TableRoots};

const SEVERAL_POINTERS: &str = "S4: it has several pointers";

/// A copy of a page whose bytes are bad.
#[derive(Debug)]
pub struct BadPage {
    /// [`Error::Corrupt`], with the address of the copy.
    pub error: Error,
    /// The other copy is good.
    pub has_copy: bool,
}

impl NodeTable {
    /// Reads both copies of all pages of the durable checkpoint with these roots from the device, also
    /// of those in the cache. The caller keeps it the newest one meanwhile. Returns the bytes read and
    /// the bad copies. A page with one good copy is written anew by the next commit. Pages below a
    /// lost page are left out. Each page is read once: a second pointer to it is told as S4.
    #[must_use]
    pub fn scrub(&self, roots: TableRoots) -> (u64, Vec<BadPage>) {
        let mut todo: Vec<(Shape, PageRef, Option<u8>)> =
            [(SHAPE, roots.node_table), (FREE_MAP_SHAPE, roots.space_map)]
                .into_iter()
                .filter(|(_, root)| !root.is_none())
                .map(|(shape, root)| (shape, root, None))
                .collect();
        let (mut read_bytes, mut bad) = (0, Vec::new());
        let mut seen = HashSet::new();
        while let Some((shape, at, height)) = todo.pop() {
            let name = shape.structure.name();
            // Keeps the walk short.
            if !seen.insert(at.addr) {
                bad.push(BadPage {
                    error: Error::corrupt(name, at.addr, SEVERAL_POINTERS),
                    has_copy: false,
                });
                continue;
            }
            let mut good = None;
            let mut failed = Vec::new();
            for addr in at.copies() {
                read_bytes += u64::from(shape.page_bytes);
                match self.store.read_copy(&shape, at, addr) {
                    Ok(page) => good = Some(page),
                    Err(Error::Io(error)) => failed.push(Error::corrupt(name, addr, error)),
                    Err(error) => failed.push(error),
                }
            }
            if let Some(page) = good.as_ref().filter(|_| !failed.is_empty()) {
                self.store.damaged.note(&shape, at, page, true);
            }
            let has_copy = good.is_some();
            bad.extend(failed.into_iter().map(|error| BadPage { error, has_copy }));
            let Some(page) = good else { continue };
            // Keeps the walk finite.
            if height.is_some_and(|height| page.height != height) {
                let detail = format!("S2: height {}", page.height);
                let error = Error::corrupt(name, at.addr, detail);
                bad.push(BadPage {
                    error,
                    has_copy: false,
                });
                continue;
            }
            let below = page.height.checked_sub(1);
            todo.extend(page.children().filter_map(|link| match link {
                Link::Disk(child) => Some((shape, *child, below)),
                Link::Dirty(_) => None,
            }));
        }
        (read_bytes, bad)
    }
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use super::*;
    use crate::record::{NewNode, NodeId, NodeKind};
    use ramet_block::{Device, Extent, MemDevice, MetadataCopies};

    const USABLE: Extent = Extent::new(1 << 20, 15 << 20);

    fn leaf(table: &NodeTable, id: u64) -> NewNode {
        NewNode {
            id: NodeId(id),
            extent: table.space().alloc(4096).unwrap(),
            offset: 0,
            copy: None,
            used_bytes: 4096,
            checksum: 1,
            kind: NodeKind::Leaf,
            height: 0,
            children: Vec::new(),
        }
    }

    /// A table of 600 leaves, of which the first is the root.
    fn table(device: &Arc<dyn Device>) -> (NodeTable, TableRoots) {
        let copies = MetadataCopies::Two;
        let roots = NodeTable::format(device, USABLE, copies).unwrap();
        let table = NodeTable::open(device, roots, USABLE, copies, false).unwrap();
        let new = (1..=600).map(|id| leaf(&table, id)).collect();
        let roots = commit(&table, new);
        (table, roots)
    }

    fn commit(table: &NodeTable, new: Vec<NewNode>) -> TableRoots {
        let commit = table.commit(new, Some(NodeId(1)), 0, &|_| false).unwrap();
        let roots = commit.roots;
        table.committed(commit);
        roots
    }

    fn spoil(device: &Arc<dyn Device>, addr: u64) {
        let mut bytes = vec![0; 4096];
        device.read_at(addr, &mut bytes).unwrap();
        bytes[100] ^= 1;
        device.write_at(addr, &bytes).unwrap();
    }

    /// Addresses of the bad copies, and whether the other copy is good.
    fn bad(table: &NodeTable, roots: TableRoots) -> Vec<(u64, bool)> {
        let tell = |page: &BadPage| match page.error {
            Error::Corrupt { addr, .. } => (addr, page.has_copy),
            ref other => panic!("{other}"),
        };
        table.scrub(roots).1.iter().map(tell).collect()
    }

    #[test]
    fn a_copy_that_rots_under_the_cache_is_found_and_the_next_commit_mends_it() {
        for pick in [|at: PageRef| at.addr, |at: PageRef| at.copy] {
            for root in [
                |at: &TableRoots| at.node_table,
                |at: &TableRoots| at.space_map,
            ] {
                let device: Arc<dyn Device> = Arc::new(MemDevice::new(USABLE.end()));
                let (table, roots) = table(&device);
                let (read_bytes, found) = table.scrub(roots);
                assert!(found.is_empty() && read_bytes > 6 * 8192, "{found:?}");
                let addr = pick(root(&roots));
                spoil(&device, addr);
                assert!(table.get(NodeId(7)).unwrap().is_some(), "from the cache");
                assert_eq!(bad(&table, roots), [(addr, true)]);
                let roots = commit(&table, vec![]);
                assert_ne!(pick(root(&roots)), addr);
                assert_eq!(bad(&table, roots), []);
                assert_eq!(table.check(&mut |_| {}).unwrap(), []);
            }
        }
    }

    #[test]
    fn a_table_opens_by_the_second_copies_and_a_commit_writes_the_first_ones_anew() {
        let device: Arc<dyn Device> = Arc::new(MemDevice::new(USABLE.end()));
        let (before, roots) = table(&device);
        drop(before);
        spoil(&device, roots.node_table.addr);
        spoil(&device, roots.space_map.addr);
        let copies = MetadataCopies::Two;
        let table = NodeTable::open(&device, roots, USABLE, copies, false).unwrap();
        assert!(table.get(NodeId(600)).unwrap().is_some());
        assert!(table.has_damaged());
        let roots = commit(&table, vec![]);
        assert_eq!((table.damaged_found(), table.has_damaged()), (2, false));
        assert_eq!(bad(&table, roots), []);
        // A page that is gone with both copies is told as such.
        spoil(&device, roots.node_table.addr);
        spoil(&device, roots.node_table.copy);
        let both = [roots.node_table.addr, roots.node_table.copy];
        assert_eq!(bad(&table, roots), both.map(|addr| (addr, false)));
    }

    #[test]
    fn a_page_that_was_written_over_since_is_not_renewed() {
        let device: Arc<dyn Device> = Arc::new(MemDevice::new(USABLE.end()));
        let (table, old) = table(&device);
        let new = vec![leaf(&table, 601)];
        let roots = commit(&table, new);
        // The pages of the commit before are free now.
        spoil(&device, old.node_table.addr);
        assert_eq!(bad(&table, old), [(old.node_table.addr, true)]);
        assert_eq!(commit(&table, vec![]).node_table, roots.node_table);
    }
}
