//! Reading every page of a checkpoint again.

use ramet_block::PageRef;

use crate::error::Error;
use crate::maps::{COUNT_SHAPE, SPACE_SHAPE};
use crate::page::{Body, Link, Shape};
use crate::record::SHAPE;
use crate::table::{NodeTable, TableRoots};

impl NodeTable {
    /// Reads all pages of the durable checkpoint with these roots from the device, also those in
    /// the cache. The caller keeps it the newest one meanwhile. Returns the bytes read and the
    /// faults, [`Error::Corrupt`] each. Pages below a lost page are left out.
    #[must_use]
    pub fn scrub(&self, roots: TableRoots) -> (u64, Vec<Error>) {
        let mut todo: Vec<(Shape, PageRef, Option<u8>)> = [
            (SHAPE, roots.node_table),
            (SPACE_SHAPE, roots.space_map),
            (COUNT_SHAPE, roots.refcounts),
        ]
        .into_iter()
        .filter(|(_, root)| !root.is_none())
        .map(|(shape, root)| (shape, root, None))
        .collect();
        let (mut read_bytes, mut bad) = (0, Vec::new());
        while let Some((shape, at, height)) = todo.pop() {
            read_bytes += u64::from(shape.page_bytes);
            let name = shape.structure.name();
            let page = match self.store.read_afresh(&shape, at) {
                Ok(page) => page,
                Err(Error::Io(error)) => {
                    bad.push(Error::corrupt(name, at.addr, error));
                    continue;
                }
                Err(error) => {
                    bad.push(error);
                    continue;
                }
            };
            // Keeps the walk finite.
            if height.is_some_and(|height| page.height != height) {
                let detail = format!("S2: height {}", page.height);
                bad.push(Error::corrupt(name, at.addr, detail));
                continue;
            }
            if let Body::Index(entries) = &page.body {
                let below = page.height.checked_sub(1);
                todo.extend(entries.iter().filter_map(|entry| match entry.link {
                    Link::Disk(child) => Some((shape, child, below)),
                    Link::Dirty(_) => None,
                }));
            }
        }
        (read_bytes, bad)
    }
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use super::*;
    use crate::record::{NewNode, NodeId, NodeKind};
    use ramet_block::{Device, Extent, MemDevice};

    #[test]
    fn a_page_that_rots_under_the_cache_is_found() {
        let usable = Extent::new(1 << 20, 15 << 20);
        let device: Arc<dyn Device> = Arc::new(MemDevice::new(usable.end()));
        let roots = NodeTable::format(&device, usable).unwrap();
        let table = NodeTable::open(&device, roots, usable, false).unwrap();
        let leaf = |id| NewNode {
            id: NodeId(id),
            extent: table.alloc(4096).unwrap(),
            used_bytes: 4096,
            checksum: 1,
            kind: NodeKind::Leaf,
            height: 0,
            children: Vec::new(),
        };
        let new = (1..=600).map(leaf).collect();
        let commit = table.commit(new, Some(NodeId(1)), 0, &|_| false).unwrap();
        let roots = commit.roots;
        table.committed(commit);
        let (read_bytes, bad) = table.scrub(roots);
        assert!(bad.is_empty() && read_bytes > 3 * 8192, "{bad:?}");

        let mut page = vec![0; 8192];
        device.read_at(roots.node_table.addr, &mut page).unwrap();
        page[100] ^= 1;
        device.write_at(roots.node_table.addr, &page).unwrap();
        assert!(table.get(NodeId(7)).unwrap().is_some(), "from the cache");
        let (_, bad) = table.scrub(roots);
        let [Error::Corrupt { addr, .. }] = &bad[..] else {
            panic!("{bad:?}")
        };
        assert_eq!(*addr, roots.node_table.addr);
    }
}
