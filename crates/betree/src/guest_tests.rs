//! Skeletons that lie in the extent of one of their segments: they are read, moved and given up like
//! any node.

use std::collections::BTreeMap;
use std::sync::Arc;

use ramet_block::{BLOCK_BYTES, Budget, Codec, Device, MemDevice};
use ramet_nodetable::NodeRecord;

use crate::node::trailer::TRAILER_BYTES;
use crate::shape::{OpenOptions, TreeShape};
use crate::testing::{contents, records};
use crate::tree::api::Tree;
use crate::tree::batch::Batch;
use crate::tree::format::FormatOptions;

const VOLUME_BYTES: u64 = 16 << 20;
const CLONES: usize = 6;

type Model = BTreeMap<Vec<u8>, Vec<u8>>;

/// A tree whose source was edited after each of six clones, and its contents.
struct Edited {
    dev: Arc<dyn Device>,
    tree: Tree,
    model: Model,
}

fn open(dev: &Arc<dyn Device>) -> Tree {
    let options = OpenOptions {
        manual: true,
        codec: Some(Codec::Raw),
        ..OpenOptions::default()
    };
    Tree::open(dev.clone(), options).unwrap()
}

fn edited() -> Edited {
    let dev: Arc<dyn Device> = Arc::new(MemDevice::new(VOLUME_BYTES));
    let format = FormatOptions {
        shape: Some(TreeShape::default()),
        ..FormatOptions::default()
    };
    Tree::format(&dev, &format).unwrap();
    let (tree, mut model) = (open(&dev), Model::new());
    let mut batch = Batch::new();
    for n in 0..20u8 {
        let (key, value) = (format!("src/{n:02}"), vec![n; 700]);
        batch.put(key.clone(), value.clone());
        model.insert(key.into(), value);
    }
    tree.apply(batch).unwrap();
    tree.checkpoint().unwrap();
    for round in 0..CLONES {
        let mut batch = Batch::new();
        let dst = format!("copy{round}/");
        batch.clone_prefix("src/", dst.clone());
        let source: Vec<_> = model
            .range(b"src/".to_vec()..b"src0".to_vec())
            .map(|(key, value)| ([dst.as_bytes(), &key[4..]].concat(), value.clone()))
            .collect();
        model.extend(source);
        tree.apply(batch).unwrap();
        tree.checkpoint().unwrap();
        let mut batch = Batch::new();
        for n in [round, round + 5] {
            let (key, value) = (format!("src/{n:02}"), vec![200 + round as u8; 30]);
            batch.put(key.clone(), value.clone());
            model.insert(key.into(), value);
        }
        tree.apply(batch).unwrap();
        tree.checkpoint().unwrap();
    }
    Edited { dev, tree, model }
}

fn guests(tree: &Tree) -> Vec<NodeRecord> {
    let all = records(tree).into_values();
    all.filter(|record| record.offset > 0).collect()
}

fn rebuild(dev: &Arc<dyn Device>) -> crate::Rebuilt {
    let budget = Budget::of_volumes(64 << 20);
    crate::rebuild(dev, &budget, &mut |_, _| {}).unwrap()
}

/// Zeros the root page of the node table, in both copies.
fn lose_table(tree: Tree, dev: &Arc<dyn Device>) {
    let table = tree.inner.checkpointer.superblock.lock().node_table;
    tree.close().unwrap();
    let after = ramet_block::superblock::read_superblock(&**dev).unwrap();
    for addr in table.copies().chain(after.node_table.copies()) {
        dev.write_at(addr, &[0; 4096]).unwrap();
    }
}

/// Reads every key of the model: each value is right, or cannot be read. Returns the numbers of both.
fn read_what_is_left(tree: &Tree, model: &Model) -> (usize, usize) {
    let (mut right, mut errors) = (0, 0);
    for (key, value) in model {
        match tree.get(key) {
            Ok(found) => {
                assert_eq!(found.as_deref(), Some(&value[..]));
                right += 1;
            }
            Err(error) => {
                assert!(error.is_of_a_read(), "{error}");
                errors += 1;
            }
        }
    }
    (right, errors)
}

/// Nodes are lost (T9), and nothing else is wrong.
fn a_node_is_lost(tree: &Tree) {
    let violations = tree.verify(&mut |_| {}).unwrap();
    assert!(!violations.is_empty());
    let others = |violation: &&String| !violation.starts_with("T9");
    assert_eq!(violations.iter().find(others), None);
}

#[test]
fn an_edited_clone_takes_one_block_and_is_read_again() {
    let Edited { dev, tree, model } = edited();
    let all = records(&tree);
    let found = guests(&tree);
    assert!(found.len() >= CLONES / 2, "{all:?}");
    for guest in &found {
        let carriers = guest.children.iter().filter_map(|child| all.get(child));
        let carrier = carriers
            .filter(|carrier| carrier.extent == guest.extent && carrier.offset == 0)
            .find(|carrier| carrier.used_bytes == guest.offset);
        assert!(carrier.is_some(), "{guest:?}");
        let alone = u64::from(guest.offset) + TRAILER_BYTES as u64;
        assert_eq!(guest.extent.len, alone.next_multiple_of(BLOCK_BYTES));
        assert!(guest.owned_bytes() == 0 && guest.extent.len <= 4 * BLOCK_BYTES);
    }
    assert_eq!(tree.verify(&mut |_| {}).unwrap(), Vec::<String>::new());
    assert_eq!(contents(&tree), model);
    tree.close().unwrap();
    let tree = open(&dev);
    assert_eq!(contents(&tree), model);
    assert_eq!(tree.verify(&mut |_| {}).unwrap(), Vec::<String>::new());
}

#[test]
fn all_space_of_guests_and_carriers_comes_back() {
    let Edited { tree, .. } = edited();
    let before = tree.inner.store.table.stats().node_bytes;
    assert!(!guests(&tree).is_empty());
    let mut batch = Batch::new();
    batch.delete_range("", None);
    tree.apply(batch).unwrap();
    for _ in 0..4 {
        tree.checkpoint().unwrap();
    }
    let after = tree.inner.store.table.stats().node_bytes;
    assert!(
        before > 8 * BLOCK_BYTES && after <= 2 * BLOCK_BYTES,
        "{before} {after}"
    );
    assert_eq!(tree.verify(&mut |_| {}).unwrap(), Vec::<String>::new());
}

#[test]
fn guests_are_found_without_a_node_table() {
    let Edited { dev, tree, model } = edited();
    let count = guests(&tree).len();
    lose_table(tree, &dev);
    let rebuilt = rebuild(&dev);
    assert!(rebuilt.lost.is_empty(), "{rebuilt:?}");
    let tree = open(&dev);
    assert_eq!(guests(&tree).len(), count);
    assert_eq!(tree.verify(&mut |_| {}).unwrap(), Vec::<String>::new());
    assert_eq!(contents(&tree), model);
}

#[test]
fn a_guest_whose_carrier_is_lost_gets_a_place_of_its_own() {
    let Edited { dev, tree, model } = edited();
    let found = guests(&tree);
    let guest = found.last().unwrap().clone();
    lose_table(tree, &dev);
    // The trailer of the carrier.
    let end = guest.extent.end() - TRAILER_BYTES as u64;
    dev.write_at(end, &[0; TRAILER_BYTES]).unwrap();
    let rebuilt = rebuild(&dev);
    assert_eq!(rebuilt.lost.len(), 1, "{rebuilt:?}");
    let tree = open(&dev);
    assert_eq!(guests(&tree).len(), found.len() - 1);
    let moved = records(&tree).into_values();
    let mut moved = moved.filter(|record| record.checksum == guest.checksum);
    let moved = moved.next().expect("the guest is there");
    assert_eq!((moved.offset, moved.used_bytes), (0, guest.used_bytes));
    a_node_is_lost(&tree);
    read_what_is_left(&tree, &model);
}

#[test]
fn a_damaged_carrier_costs_its_messages_alone() {
    let Edited { dev, tree, model } = edited();
    let guest = guests(&tree).pop().unwrap();
    tree.close().unwrap();
    dev.write_at(guest.extent.addr + 40, &[0xa5; 8]).unwrap();
    let tree = open(&dev);
    let (right, errors) = read_what_is_left(&tree, &model);
    assert!(errors > 0 && right > errors, "{errors} {right}");
}

/// Rotten bytes are not copied: the guest gets a place that has not its checksum.
#[test]
fn a_rebuild_goes_on_without_a_guest_that_cannot_be_read() {
    let Edited { dev, tree, model } = edited();
    let guest = guests(&tree).pop().unwrap();
    lose_table(tree, &dev);
    let at = guest.extent.addr + u64::from(guest.offset);
    dev.write_at(at + 20, &[0xa5; 8]).unwrap();
    let rebuilt = rebuild(&dev);
    assert_eq!(rebuilt.lost.len(), 1, "{rebuilt:?}");
    let tree = open(&dev);
    a_node_is_lost(&tree);
    read_what_is_left(&tree, &model);
}

/// A rebuild that was cut off may leave a newer trailer over bytes that are none of the node.
#[test]
fn of_two_nodes_of_a_number_the_whole_one_is_found() {
    let Edited { dev, tree, model } = edited();
    let sb = tree.inner.checkpointer.superblock.lock().clone();
    let mut nodes = records(&tree).into_iter();
    let (id, record) = nodes.find(|(_, record)| record.offset > 0).unwrap();
    let hole = tree.inner.store.table.space().alloc(BLOCK_BYTES).unwrap();
    lose_table(tree, &dev);
    let torn = crate::node::trailer::Trailer {
        id,
        opening: sb.openings + 7,
        kind: crate::node::handle::Kind::Skeleton,
        height: record.height,
        place: crate::node::handle::Place {
            extent: hole,
            offset: 0,
            used_bytes: record.used_bytes.min(3000),
            checksum: record.checksum,
        },
    };
    let end = hole.end() - TRAILER_BYTES as u64;
    dev.write_at(end, &torn.encode(sb.node_seed)).unwrap();
    let rebuilt = rebuild(&dev);
    assert!(rebuilt.lost.is_empty(), "{rebuilt:?}");
    assert_eq!(contents(&open(&dev)), model);
}

#[test]
fn a_close_without_changes_writes_a_superblock_alone() {
    let Edited { dev, tree, model } = edited();
    let last = |dev: &Arc<dyn Device>| ramet_block::superblock::read_superblock(&**dev).unwrap();
    tree.checkpoint().unwrap();
    let before = last(&dev);
    tree.close().unwrap();
    let after = last(&dev);
    assert!(!before.clean && after.clean);
    let tables = |sb: &ramet_block::Superblock| (sb.node_table, sb.space_map, sb.root_node);
    assert_eq!(tables(&after), tables(&before));
    assert_eq!(after.generation, before.generation + 1);
    assert!(after.next_node >= before.next_node && after.next_seq == before.next_seq);
    let tree = open(&dev);
    assert_eq!(contents(&tree), model);
    // A volume on which nothing happened is closed and rebuilt like any.
    lose_table(tree, &dev);
    assert!(rebuild(&dev).lost.is_empty());

    let tree = open(&dev);
    let mut batch = Batch::new();
    batch.put("late", "1");
    tree.apply(batch).unwrap();
    let before = last(&dev);
    tree.close().unwrap();
    assert_ne!(tables(&last(&dev)), tables(&before), "a batch came");

    let tree = open(&dev);
    tree.checkpoint().unwrap();
    tree.inner.store.space_debt.set_due();
    tree.close().unwrap();
    assert!(last(&dev).space_debt, "a sweep is due");
    assert_eq!(open(&dev).get(b"late").unwrap().as_deref(), Some(&b"1"[..]));
}
