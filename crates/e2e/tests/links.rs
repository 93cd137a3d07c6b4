//! Hard links on a mount: between clones and their surroundings, and many of them below a tree.
//!
//! `RAMET_LINKS` sets the number of links of that tree. The times of the commands that clone,
//! replace and remove it are printed.

use std::fs::File;
use std::os::unix::fs::MetadataExt;
use std::path::Path;
use std::process::Command;
use std::time::Instant;

use ramet_e2e::{Bed, Mount, number, until};

const TRANSPORTS: [&str; 2] = ["no_io_uring", "io_uring"];

fn sh(dir: &Path, script: &str) {
    let mut shell = Command::new("bash");
    let out = shell
        .args(["-euo", "pipefail", "-c", script])
        .current_dir(dir)
        .output()
        .expect("a shell runs");
    let said = String::from_utf8_lossy(&out.stderr);
    assert!(out.status.success(), "{script}: {said}");
}

fn for_each_transport(each: impl Fn(&Mount)) {
    for transport in TRANSPORTS {
        let bed = Bed::new("2G");
        let mount = bed.mount(&["-o", transport]);
        each(&mount);
        mount.umount();
        bed.fsck();
    }
}

#[test]
fn programs_link_between_a_clone_and_directories_beside_it() {
    for_each_transport(|mount| {
        let root = mount.root();
        sh(root, "mkdir -p tpl/d; echo a > tpl/d/a; echo b > tpl/b");
        mount.clone_path(&root.join("tpl"), &root.join("clone"));
        let script = r#"
            cp -al clone linked
            [ clone/d/a -ef linked/d/a ]; [ "$(stat -c %h clone/d/a)" = 2 ]
            mkdir backup; rsync -a --link-dest="$PWD/clone" clone/ backup/
            [ clone/b -ef backup/b ]; [ "$(stat -c %h linked/b)" = 3 ]
            ln backup/b clone/e; mv clone/e tpl/e; [ tpl/e -ef linked/b ]
            rm -r linked; [ "$(stat -c %h tpl/e)" = 3 ]
            git init -q repo
            cd repo; echo 1 > f; git add f; git -c user.name=a -c user.email=a@b commit -qm 1
        "#;
        sh(root, script);
        mount.clone_path(&root.join("repo"), &root.join("fork"));
        sh(
            root,
            "git clone -q --local fork other; git -C other fsck --strict",
        );
        // A clone of a tree with links outside is whole, and apart from them.
        mount.clone_path(&root.join("clone"), &root.join("again"));
        sh(
            root,
            r#"[ "$(stat -c %h again/b)" = 1 ]; echo c > again/b; [ "$(cat tpl/e)" = b ]"#,
        );
    });
}

#[test]
fn overlay_has_its_upper_directory_in_a_clone() {
    if !rustix::process::geteuid().is_root() {
        println!("not root: no overlay");
        return;
    }
    for_each_transport(|mount| {
        let root = mount.root();
        sh(
            root,
            "mkdir -p tpl lower/d work merged; echo 1 > lower/1; echo 2 > lower/d/2",
        );
        mount.clone_path(&root.join("tpl"), &root.join("upper"));
        let script = r#"
            mount -t overlay overlay -o lowerdir=lower,upperdir=upper,workdir=work merged
            trap 'umount merged' EXIT
            rm merged/1; [ ! -e merged/1 ]
            mv merged/d/2 merged/2 && echo 3 >> merged/2
            rm -r merged/d; mkdir merged/d; [ -z "$(ls merged/d)" ]
            ln merged/2 merged/3; [ "$(stat -c %h merged/3)" = 2 ]
            for n in $(seq 40); do echo > merged/n$n; done; rm merged/n*
        "#;
        sh(root, script);
    });
}

/// A store and a directory of links into it, as pnpm makes them. The argument is their number.
const STORE: &str = r#"
import os, sys
for n in range(int(sys.argv[1])):
    if n % 100 == 0:
        os.makedirs(f"store/{n // 100}"); os.makedirs(f"app/modules/{n // 100}")
    name = f"{n // 100}/{n}"
    with open(f"store/{name}", "w") as file: file.write(name)
    os.link(f"store/{name}", f"app/modules/{name}")
"#;

/// Runs a command that the user waits for, and prints its time.
fn timed<R>(name: &str, command: impl FnOnce() -> R) -> R {
    let begun = Instant::now();
    let done = command();
    println!("{name}: {:.1} ms", begun.elapsed().as_secs_f64() * 1e3);
    done
}

#[test]
fn counts_of_many_links_are_right_at_once_and_settled_in_the_background() {
    // Links 777 and 778 get names outside.
    let links = number("RAMET_LINKS", 6000).max(1000);
    for_each_transport(|mount| {
        let root = mount.root();
        std::fs::write(root.join("make.py"), STORE).expect("there is room");
        sh(root, &format!("python3 make.py {links}; mkdir small; sync"));
        println!("{}, {links} links", mount.stat()["transport"]);
        let paths = ["app", "c1", "c2", "small"].map(|name| root.join(name));
        let [app, one, two, small] = &paths;
        timed("clone", || mount.clone_path(app, one));
        timed("clone of the clone", || mount.clone_path(one, two));
        sh(
            root,
            r#"[ "$(stat -c %h c1/modules/7/777 c2/modules/7/777 | sort -u)" = 1 ]"#,
        );
        sh(root, r#"[ "$(stat -c %h store/7/777)" = 2 ]"#);
        timed("replacement", || mount.replace_path(one, app));
        timed("replacement by another tree", || {
            mount.replace_path(small, two);
        });
        until("links are settled", || {
            mount.stat()["links_waiting"] != true
        });
        // The kernel was told of each of them.
        sh(
            root,
            r#"[ -z "$(find store app c1 -type f -not -links 1)" ]"#,
        );
        sh(
            root,
            "ln c1/modules/7/777 store/outside; ln app/modules/7/778 c1/inside",
        );
        sh(
            root,
            r#"[ "$(stat -c %h c1/inside store/outside | sort -u)" = 2 ]"#,
        );
        let single = 2 * links - 2;
        sh(
            root,
            &format!(r#"[ "$(find c1 app -type f -links 1 | wc -l)" = {single} ]"#),
        );
        timed("removal", || mount.remove(one));
        // The command does not wait until the kernel is told of each count that it keeps.
        let outside = root.join("store/outside");
        timed("count outside, afterwards", || {
            until("the link in the tree does not count", || {
                outside.metadata().expect("a status").nlink() == 1
            });
        });
        let text = std::fs::read_to_string(outside).expect("a file");
        assert_eq!(text, "7/777");
        assert_eq!(mount.stat()["links_failures"], 0);
    });
}

/// Bytes that a removed tree gives back, beside the ones of the files that stay open.
const LARGE: u64 = 8 << 20;

#[test]
fn removed_tree_gives_its_space_back_when_its_open_hard_link_is_closed() {
    let in_one = ("mkdir t; echo x > t/g; ln t/g t/h", "t", "t/g");
    let in_three = "mkdir -p t/d/e; echo x > t/d/e/g; ln t/d/e/g out; ln t/d/e/g t/h";
    let cloned = "mkdir -p s/d; echo x > s/d/g; ln s/d/g s/h";
    for (made, gone, name) in [in_one, (in_three, "t", "t/d/e/g"), (cloned, "c", "c/d/g")] {
        for_each_transport(|mount| {
            let root = mount.root();
            sh(root, made);
            if gone == "c" {
                mount.clone_path(&root.join("s"), &root.join("c"));
            }
            let tree = root.join(gone);
            let script = "head -c 8M /dev/urandom > big; find . | xargs stat > /dev/null";
            sh(&tree, script);
            let before = mount.allocated_settled();
            let open = File::open(root.join(name)).expect("a file");
            mount.remove(&tree);
            drop(open);
            until("the space of a removed tree comes back", || {
                mount.allocated_settled() + LARGE / 2 < before
            });
        });
    }
}

#[test]
fn removed_trees_leave_open_hard_links_without_names() {
    for_each_transport(|mount| {
        let root = mount.root();
        let script = "mkdir -p s/t n; echo x > s/a; ln s/a s/b; echo y > s/t/g; ln s/t/g s/l";
        sh(root, script);
        // Clones of a directory with all names, with one of two, and below another directory.
        for (source, clone, name, gone) in [
            ("s", "c", "c/a", "c"),
            ("s/t", "d", "d/g", "d"),
            ("s", "n/c", "n/c/a", "n"),
        ] {
            mount.clone_path(&root.join(source), &root.join(clone));
            let open = File::open(root.join(name)).expect("a file");
            assert!(open.metadata().expect("a status").nlink() > 0);
            mount.remove(&root.join(gone));
            until("an open file of a removed tree has no name", || {
                open.metadata().expect("a status").nlink() == 0
            });
        }
    });
}
