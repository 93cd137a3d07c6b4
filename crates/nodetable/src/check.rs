//! Invariants of the node table, for fsck and tests.
//!
//! - N1: every page and record can be read and decodes, and every extent lies in the usable area.
//! - N2: a record's count is the number of child entries that name it, plus one for the root.
//! - N3: every node that is named is in the table.
//! - N4: pages and extents of nodes are disjoint (S6), and the map is their complement (M2).
//! - N5: the zombies are exactly the nodes without references.
//! - N6: the counters agree with the records.
//! - N7: an extent that the allocator hands out is free in the map of the last commit.
//! - N8: every copy of every page has the bytes that its pointer says.
//! - N9: a guest lies in the extent of a node that it names, behind the bytes of that one.

use std::collections::{BTreeSet, HashMap};

use ramet_block::{Call, PageRef};

use crate::error::{Error, Result};
use crate::page::Link;
use crate::record::{Head, KeyKind, Meta, NodeId, NodeRecord, parse_key, record_key};
use crate::scrub::BadPage;
use crate::table::{NodeTable, TableRoots, Writer, has_carrier, read_record};
use crate::tree::ShadowTree;
use crate::verify::{Violation, verify_free_map, verify_tree};

/// Progress is reported once per this many nodes.
const PROGRESS_STEP: u64 = 1024;

/// The sums over all records.
#[derive(Default)]
struct Census {
    refs: HashMap<NodeId, u64>,
    named: HashMap<NodeId, u64>,
    zombies: BTreeSet<NodeId>,
    meta: Meta,
    stored_meta: Meta,
}

impl NodeTable {
    /// Checks everything above on the state of the last commit, whose pages are all read; nodes are
    /// not. `progress` is called now and then with the number of nodes seen. Commits wait
    /// meanwhile.
    ///
    /// # Errors
    /// None of a read: a page or record that is corrupt, or cannot be read, is a violation, N1.
    pub fn check(&self, progress: &mut dyn FnMut(u64)) -> Result<Vec<Violation>> {
        let writer = self.writer.lock();
        let mut violations = Vec::new();
        match self.check_all(&writer, progress, &mut violations) {
            Ok(()) => Ok(violations),
            Err(error) => {
                let is_of_a_read = match &error {
                    Error::Corrupt { .. } => true,
                    Error::Io(failed) => failed.call == Call::Read,
                    _ => false,
                };
                if !is_of_a_read {
                    return Err(error);
                }
                violations.push(Violation::new("N1", error.to_string()));
                Ok(violations)
            }
        }
    }

    /// Adds the violations. After an error those before it are there.
    fn check_all(
        &self,
        writer: &Writer,
        progress: &mut dyn FnMut(u64),
        violations: &mut Vec<Violation>,
    ) -> Result<()> {
        let (of_tree, mut taken) = verify_tree(&writer.tree)?;
        violations.extend(of_tree);
        // A tree that names a page twice has no order of keys to go by.
        if violations.iter().any(|found| found.invariant == "S4") {
            return Ok(());
        }
        let mut census = Census::default();
        let mut nodes = 0;
        for entry in writer.tree.range(&[]) {
            let (key, value) = entry?;
            match parse_key(&key)? {
                KeyKind::Meta => census.stored_meta = Meta::decode(&value)?,
                KeyKind::Zombie(id) => drop(census.zombies.insert(id)),
                KeyKind::Piece(id, piece) => {
                    let head = writer.tree.lookup(&record_key(id))?;
                    let head = head.map(|head| Head::decode(id, &head, self.store.usable()));
                    if head
                        .transpose()?
                        .is_none_or(|head| piece == 0 || piece > head.pieces())
                    {
                        let detail = format!("piece {piece} of node {} has no owner", id.0);
                        violations.push(Violation::new("N1", detail));
                    }
                }
                KeyKind::Record(id) => {
                    let record = read_record(&self.store, &writer.tree.root, id)?;
                    let record =
                        record.ok_or_else(|| Error::corrupt("node record", id.0, "gone"))?;
                    taken.extend(record.extents());
                    violations.extend(self.check_guest(writer, id, &record)?);
                    census.refs.insert(id, record.refs);
                    *census.meta.counter(record.kind) += 1;
                    census.meta.node_bytes +=
                        record.extents().map(|extent| extent.len).sum::<u64>();
                    for child in record.children {
                        *census.named.entry(child).or_default() += 1;
                    }
                    nodes += 1;
                    if nodes % PROGRESS_STEP == 0 {
                        progress(nodes);
                    }
                }
            }
        }
        violations.extend(census.judge());
        violations.extend(verify_free_map(&self.store, &writer.free_map, &mut taken)?);
        violations.extend(self.check_allocator(writer)?);
        violations.extend(self.check_copies(writer));
        Ok(())
    }

    /// N9.
    fn check_guest(
        &self,
        writer: &Writer,
        id: NodeId,
        record: &NodeRecord,
    ) -> Result<Option<Violation>> {
        if record.offset == 0 {
            return Ok(None);
        }
        let place = (record.extent, record.offset);
        if has_carrier(&self.store, &writer.tree.root, &record.children, place)? {
            return Ok(None);
        }
        let extent = record.extent;
        let detail = format!("node {} lies in {extent}, which no child of it owns", id.0);
        Ok(Some(Violation::new("N9", detail)))
    }

    /// N8. Trees that a commit has not written yet are left out.
    fn check_copies(&self, writer: &Writer) -> Vec<Violation> {
        let on_disk = |tree: &ShadowTree| match &tree.root {
            Some(Link::Disk(root)) => *root,
            Some(Link::Dirty(_)) | None => PageRef::NONE,
        };
        let roots = TableRoots {
            node_table: on_disk(&writer.tree),
            space_map: on_disk(&writer.free_map.tree),
        };
        let (_, bad) = self.scrub(roots);
        let tell = |page: BadPage| {
            let copy = if page.has_copy {
                "the other copy is good"
            } else {
                "no good copy is left"
            };
            Violation::new("N8", format!("{}; {copy}", page.error))
        };
        bad.into_iter().map(tell).collect()
    }

    /// N7.
    fn check_allocator(&self, writer: &Writer) -> Result<Vec<Violation>> {
        let Ok(holes) = writer.free_map.holes() else {
            return Ok(Vec::new());
        };
        let free = self.store.space.lock().free_extents();
        let is_free = |extent: &ramet_block::Extent| {
            let before = holes.partition_point(|hole| hole.addr <= extent.addr);
            before > 0 && holes[before - 1].contains(extent)
        };
        let wrong = free.iter().filter(|extent| !is_free(extent));
        let violation = |extent| Violation::new("N7", format!("{extent} is not free on disk"));
        Ok(wrong.map(violation).collect())
    }
}

impl Census {
    fn judge(mut self) -> Vec<Violation> {
        let mut violations = Vec::new();
        self.meta.root = self.stored_meta.root;
        if self.meta.root != 0 {
            *self.named.entry(NodeId(self.meta.root)).or_default() += 1;
        }
        for (id, refs) in &self.refs {
            let named = self.named.get(id).copied().unwrap_or(0);
            if named != *refs {
                let detail = format!(
                    "node {} has {refs} references and is named {named} times",
                    id.0
                );
                violations.push(Violation::new("N2", detail));
            }
            if (*refs == 0) != self.zombies.contains(id) {
                let detail = format!("node {} with {refs} references", id.0);
                violations.push(Violation::new("N5", detail));
            }
        }
        for id in self.zombies.iter().filter(|id| !self.refs.contains_key(id)) {
            violations.push(Violation::new(
                "N5",
                format!("zombie {} is not in the table", id.0),
            ));
        }
        for id in self.named.keys().filter(|id| !self.refs.contains_key(id)) {
            let detail = format!("node {} is named but not in the table", id.0);
            violations.push(Violation::new("N3", detail));
        }
        if self.meta != self.stored_meta {
            let detail = format!("counted {:?}, stored {:?}", self.meta, self.stored_meta);
            violations.push(Violation::new("N6", detail));
        }
        violations.sort_unstable_by(|a, b| (a.invariant, &a.detail).cmp(&(b.invariant, &b.detail)));
        violations
    }
}

#[cfg(test)]
mod tests {
    use std::io;
    use std::sync::Arc;
    use std::sync::atomic::{AtomicBool, Ordering};

    use ramet_block::{Device, Extent, MemDevice, MetadataCopies};

    use super::*;
    use crate::record::{NewNode, NodeKind, piece_key, zombie_key};

    const USABLE: Extent = Extent::new(1 << 20, 15 << 20);

    /// A device that cannot be read while it is told so.
    struct Unreadable {
        below: MemDevice,
        is_bad: AtomicBool,
    }

    impl Device for Unreadable {
        fn len_bytes(&self) -> u64 {
            self.below.len_bytes()
        }

        fn read_at(&self, addr: u64, buf: &mut [u8]) -> io::Result<()> {
            match self.is_bad.load(Ordering::Relaxed) {
                true => Err(io::Error::other("a sector cannot be read")),
                false => self.below.read_at(addr, buf),
            }
        }

        fn write_at(&self, addr: u64, buf: &[u8]) -> io::Result<()> {
            self.below.write_at(addr, buf)
        }

        fn sync(&self) -> io::Result<()> {
            self.below.sync()
        }

        fn discard(&self, addr: u64, len_bytes: u64) -> io::Result<()> {
            self.below.discard(addr, len_bytes)
        }
    }

    fn table() -> NodeTable {
        table_on(Arc::new(MemDevice::new(USABLE.end())))
    }

    /// Twenty leaves under one skeleton.
    fn table_on(device: Arc<dyn Device>) -> NodeTable {
        let roots = NodeTable::format(&device, USABLE, MetadataCopies::Two).unwrap();
        let table = NodeTable::open(&device, roots, USABLE, MetadataCopies::Two, false).unwrap();
        let node = |id, children: Vec<NodeId>| NewNode {
            id: NodeId(id),
            extent: table.space().alloc(4096).unwrap(),
            offset: 0,
            copy: None,
            used_bytes: 4096,
            checksum: 1,
            kind: if children.is_empty() {
                NodeKind::Leaf
            } else {
                NodeKind::Skeleton
            },
            height: u32::from(!children.is_empty()),
            children,
        };
        let mut new: Vec<_> = (1..=20).map(|id| node(id, vec![])).collect();
        new.push(node(21, (1..=20).map(NodeId).collect()));
        let commit = table.commit(new, Some(NodeId(21)), 0, &|_| false).unwrap();
        table.committed(commit);
        table
    }

    fn found(forge: impl FnOnce(&NodeTable, &mut Writer)) -> Vec<&'static str> {
        let table = table();
        assert_eq!(table.check(&mut |_| {}).unwrap(), []);
        forge(&table, &mut table.writer.lock());
        let violations = table.check(&mut |_| {}).unwrap();
        violations
            .iter()
            .map(|violation| violation.invariant)
            .collect()
    }

    fn change_head(writer: &mut Writer, id: u64, change: impl FnOnce(&mut Head)) {
        let key = record_key(NodeId(id));
        let bytes = writer.tree.lookup(&key).unwrap().unwrap();
        let mut head = Head::decode(NodeId(id), &bytes, USABLE).unwrap();
        change(&mut head);
        writer.tree.insert(&key, &head.encode()).unwrap();
        writer.free_map.settle(vec![]).unwrap();
    }

    #[test]
    fn n1_a_record_that_does_not_decode() {
        let got = found(|_, writer| {
            writer.tree.insert(&record_key(NodeId(3)), &[9, 9]).unwrap();
        });
        assert_eq!(got, ["N1"]);
    }

    #[test]
    fn n1_a_page_that_cannot_be_read() {
        let device = Arc::new(Unreadable {
            below: MemDevice::new(USABLE.end()),
            is_bad: AtomicBool::new(false),
        });
        let table = table_on(device.clone());
        table.store.forget_cached();
        device.is_bad.store(true, Ordering::Relaxed);
        let violations = table.check(&mut |_| {}).unwrap();
        let [violation] = &violations[..] else {
            panic!("{violations:?}")
        };
        assert_eq!(violation.invariant, "N1");
        assert!(violation.detail.contains("reading node table page"));
    }

    #[test]
    fn n1_a_piece_without_an_owner() {
        let got = found(|_, writer| {
            writer.tree.insert(&piece_key(NodeId(3), 1), &[1]).unwrap();
            writer.free_map.settle(vec![]).unwrap();
        });
        assert_eq!(got, ["N1"]);
    }

    #[test]
    fn n2_a_wrong_count() {
        assert_eq!(
            found(|_, writer| change_head(writer, 3, |head| head.refs += 1)),
            ["N2"]
        );
    }

    #[test]
    fn n3_a_named_node_that_is_missing() {
        let got = found(|_, writer| {
            writer.tree.remove(&record_key(NodeId(3))).unwrap();
            writer.free_map.settle(vec![]).unwrap();
        });
        assert_eq!(got, ["N3", "N6", "M2"]);
    }

    #[test]
    fn n4_two_nodes_in_one_place() {
        let got = found(|_, writer| {
            let key = record_key(NodeId(4));
            let bytes = writer.tree.lookup(&key).unwrap().unwrap();
            let place = Head::decode(NodeId(4), &bytes, USABLE).unwrap().extent;
            change_head(writer, 3, |head| head.extent = place);
        });
        assert_eq!(got, ["S6", "M2"]);
    }

    #[test]
    fn n5_a_living_zombie() {
        let got = found(|_, writer| {
            writer.tree.insert(&zombie_key(NodeId(3)), &[]).unwrap();
            writer.free_map.settle(vec![]).unwrap();
        });
        assert_eq!(got, ["N5"]);
    }

    #[test]
    fn n6_a_wrong_counter() {
        let got = found(|_, writer| {
            let meta = Meta {
                leaves: 19,
                ..writer.meta
            };
            writer.tree.insert(&Meta::KEY, &meta.encode()).unwrap();
            writer.free_map.settle(vec![]).unwrap();
        });
        assert_eq!(got, ["N6"]);
    }

    #[test]
    fn n7_an_allocator_that_hands_out_what_is_in_use() {
        let got = found(|table, writer| {
            let bytes = writer.tree.lookup(&record_key(NodeId(3))).unwrap().unwrap();
            let extent = Head::decode(NodeId(3), &bytes, USABLE).unwrap().extent;
            table.store.space.lock().free_now(extent);
        });
        assert_eq!(got, ["N7"]);
    }

    /// A node of 100 bytes in a block, and one of 50 bytes behind it that names it.
    fn carrier_and_guest(table: &NodeTable) -> Vec<NewNode> {
        let carrier = NewNode {
            id: NodeId(31),
            extent: table.space().alloc(4096).unwrap(),
            offset: 0,
            copy: None,
            used_bytes: 100,
            checksum: 1,
            kind: NodeKind::Segment,
            height: 0,
            children: vec![],
        };
        let guest = NewNode {
            id: NodeId(32),
            offset: 100,
            used_bytes: 50,
            kind: NodeKind::Skeleton,
            height: 1,
            children: vec![carrier.id],
            ..carrier.clone()
        };
        vec![carrier, guest]
    }

    #[test]
    fn the_extent_of_a_carrier_is_free_when_carrier_and_guest_have_gone() {
        let table = table();
        let commit = |new, root| {
            let commit = table.commit(new, root, usize::MAX, &|_| false).unwrap();
            table.committed(commit);
            assert_eq!(table.check(&mut |_| {}).unwrap(), []);
            table.stats().node_bytes
        };
        let before = commit(vec![], Some(NodeId(21)));
        let new = carrier_and_guest(&table);
        let place = new[0].extent;
        let above = |id, children| NewNode {
            id: NodeId(id),
            extent: table.space().alloc(4096).unwrap(),
            kind: NodeKind::Skeleton,
            height: 2,
            children,
            ..new[0].clone()
        };
        let first = above(33, vec![NodeId(21), NodeId(32)]);
        let all = [new.clone(), vec![first]].concat();
        assert_eq!(commit(all, Some(NodeId(33))), before + 2 * 4096);
        // The guest goes, and the carrier is named by another node.
        let second = above(34, vec![NodeId(21), NodeId(31)]);
        assert_eq!(commit(vec![second], Some(NodeId(34))), before + 2 * 4096);
        assert!(table.get(NodeId(32)).unwrap().is_none());
        assert!(!table.space().pin(place), "the carrier is there");
        assert_eq!(commit(vec![], Some(NodeId(21))), before);
        assert!(table.space().pin(place), "nobody is there");
    }

    #[test]
    fn a_guest_in_free_space_is_refused() {
        let table = table();
        let new = carrier_and_guest(&table);
        table.space().free_unpublished(new[0].extent);
        let refused = table.commit(vec![new[1].clone()], Some(NodeId(21)), 0, &|_| false);
        assert!(matches!(refused, Err(Error::Corrupt { .. })), "{refused:?}");
    }

    #[test]
    fn n9_a_guest_without_its_carrier() {
        let forge = |change: fn(&mut Head)| {
            found(|table, writer| {
                let new = carrier_and_guest(table);
                let mut space = Vec::new();
                for node in &new {
                    space.extend(node.extents().map(|extent| (extent, -1)));
                    let (mut head, _) = Head::of(node, 1).unwrap();
                    if node.offset > 0 {
                        change(&mut head);
                    }
                    writer
                        .tree
                        .insert(&record_key(node.id), &head.encode())
                        .unwrap();
                }
                writer.free_map.settle(space).unwrap();
            })
        };
        // Nobody names the guest, and the counters do not count the two.
        let beside = ["N2", "N6"];
        assert_eq!(forge(|_| {}), beside);
        let with = ["N9", "N2", "N6"];
        assert_eq!(forge(|head| head.offset = 99), with);
        assert_eq!(forge(|head| head.extent.addr += 4096), with);
        assert_eq!(forge(|head| head.extent.len += 4096), with);
    }

    #[test]
    fn m1_holes_that_touch() {
        let got = found(|_, writer| {
            let hole = *writer.free_map.holes().unwrap().last().unwrap();
            let middle = hole.addr + 8192;
            let set = |writer: &mut Writer, addr: u64, len: u64| {
                writer
                    .free_map
                    .tree
                    .insert(&addr.to_be_bytes(), &len.to_le_bytes())
                    .unwrap();
            };
            set(writer, hole.addr, 8192);
            set(writer, middle, hole.end() - middle);
        });
        assert_eq!(got, ["M1"]);
    }

    #[test]
    fn m2_space_that_leaked() {
        let got = found(|table, writer| {
            let extent = table.space().alloc(4096).unwrap();
            writer.free_map.settle(vec![(extent, -1)]).unwrap();
        });
        assert_eq!(got, ["M2"]);
    }

    #[test]
    fn m2_space_in_use_that_is_free_on_disk_too() {
        let got = found(|_, writer| {
            let bytes = writer.tree.lookup(&record_key(NodeId(3))).unwrap().unwrap();
            let extent = Head::decode(NodeId(3), &bytes, USABLE).unwrap().extent;
            writer.free_map.settle(vec![(extent, 1)]).unwrap();
        });
        assert_eq!(got, ["M2"]);
    }
}
