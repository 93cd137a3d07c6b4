//! Work of users, in a plain and in a cloned directory (BetrFS 0.5, figure 13).

use std::fs::File;
use std::io::Write;
use std::path::{Path, PathBuf};

use super::run::Run;
use crate::command::run as run_program;
use crate::error::{At, Result};
use crate::load;
use crate::meter::Cost;
use crate::report::Targets;
use crate::stage::Stage;

/// One in so many files is changed.
const CHANGED: usize = 10;
const MESSAGES: u64 = 1_000;

type Task = fn(&Stage<'_>, &Path) -> Result<()>;

#[derive(Clone, Copy)]
enum Kind {
    Reads,
    Writes,
}

impl Kind {
    /// Nothing may be more than a tenth slower for reading, or a quarter for writing.
    fn limit(self) -> f64 {
        match self {
            Kind::Reads => 1.1,
            Kind::Writes => 1.25,
        }
    }
}

const TASKS: [(&str, Kind, Task); 10] = [
    ("find", Kind::Reads, |_, dir| load::find(dir, "wait.c")),
    ("grep -r", Kind::Reads, |_, dir| {
        load::grep(dir, "cpu_to_be64")
    }),
    ("tar", Kind::Reads, |_, dir| {
        // GNU tar reads nothing when it writes to /dev/null itself.
        let script = "tar -C \"$1\" -cf - . | cat >/dev/null";
        let args = [
            "-c".as_ref(),
            script.as_ref(),
            "sh".as_ref(),
            dir.as_os_str(),
        ];
        run_program("sh", &args).map(drop)
    }),
    (
        "git diff of what did not change",
        Kind::Reads,
        |stage, dir| git(&stage.path(INDEX), dir, "git diff --quiet"),
    ),
    (
        "append to each 10th file + sync",
        Kind::Writes,
        |stage, dir| {
            for path in load::files(dir)?.iter().step_by(CHANGED) {
                let mut file = File::options().append(true).open(path).at(path)?;
                file.write_all(b"one more line\n").at(path)?;
            }
            stage.sync()
        },
    ),
    ("rsync into it + sync", Kind::Writes, |stage, dir| {
        let (mut from, mut to) = (
            stage.path("other").into_os_string(),
            dir.as_os_str().to_owned(),
        );
        from.push("/");
        to.push("/");
        run_program(
            "rsync",
            &[
                "-a".as_ref(),
                "--inplace".as_ref(),
                from.as_os_str(),
                to.as_os_str(),
            ],
        )?;
        stage.sync()
    }),
    ("untar into it + sync", Kind::Writes, |stage, dir| {
        let archive = stage.path(ARCHIVE);
        run_program(
            "tar",
            &[
                "-C".as_ref(),
                dir.as_os_str(),
                "-xf".as_ref(),
                archive.as_os_str(),
            ],
        )?;
        stage.sync()
    }),
    ("git clone into it + sync", Kind::Writes, |stage, dir| {
        let mut from = std::ffi::OsString::from("file://");
        from.push(stage.path(REPOSITORY));
        let to = dir.join("fetched");
        let args = [
            "clone".as_ref(),
            "--quiet".as_ref(),
            from.as_os_str(),
            to.as_os_str(),
        ];
        run_program("git", &args)?;
        stage.sync()
    }),
    ("mail, synced one by one", Kind::Writes, |_, dir| {
        load::serve_mail(&dir.join("mail"), MESSAGES, 1)
    }),
    ("rm -rf + sync", Kind::Writes, |stage, dir| {
        run_program("rm", &["-rf".as_ref(), dir.as_os_str()])?;
        stage.sync()
    }),
];

/// The archive that is unpacked.
const ARCHIVE: &str = "archive.tar";
/// The repository that is fetched.
const REPOSITORY: &str = "fetched.git";
/// The repository that trees are compared with.
const INDEX: &str = "repository";

/// Runs git commands in the work tree `dir`, whose `repository` lies beside all trees. The
/// repository knows the times of change and the inode numbers of the original, so git does not
/// compare them, as usual in copies.
fn git(repository: &Path, dir: &Path, script: &str) -> Result<()> {
    let script = format!(
        "cd \"$2\" && export GIT_DIR=\"$1\" GIT_WORK_TREE=. && \
         git() {{ command git -c core.checkStat=minimal -c core.trustctime=false \"$@\"; }} && {script}"
    );
    let args = [
        "-c".as_ref(),
        script.as_ref(),
        "sh".as_ref(),
        repository.as_os_str(),
        dir.as_os_str(),
    ];
    run_program("sh", &args).map(drop)
}

/// Makes the tree, its clone, and the archive, repository and index that tasks work with; the two
/// directories.
fn prepare(run: &mut Run<'_, '_>, stage: &mut Stage<'_>) -> Result<[PathBuf; 2]> {
    let dirs = ["plain", "cloned"].map(|name| stage.path(name));
    let other = stage.path("other");
    stage.peer.make_tree(&dirs[0])?;
    run.source_tree(&dirs[0])?;
    stage.cold()?;
    std::fs::create_dir(&other).at(&other)?;
    load::create_files(&other, run.scaled(2_000, 20), 4096, 1, run.plan.seed)?;
    let archive = stage.path(ARCHIVE);
    run_program(
        "tar",
        &[
            "-C".as_ref(),
            other.as_os_str(),
            "--transform=s,^[.],unpacked,".as_ref(),
            "-cf".as_ref(),
            archive.as_os_str(),
            ".".as_ref(),
        ],
    )?;
    git(
        &stage.path(REPOSITORY),
        &other,
        "git init --quiet && git add . && \
         git -c user.name=bench -c user.email=bench@localhost commit --quiet --message=all && git repack -q -a -d",
    )?;
    // Names, times and sums of all files, and no contents.
    git(
        &stage.path(INDEX),
        &dirs[0],
        "git init --quiet && git ls-files --others -z | git update-index --add --info-only -z --stdin",
    )?;
    stage.clone_tree(&dirs[0], &dirs[1])?;
    stage.sync()?;
    Ok(dirs)
}

pub(super) fn plain_and_cloned(run: &mut Run<'_, '_>) -> Result<()> {
    let mut stage = run.stage()?;
    let dirs = prepare(run, &mut stage)?;
    for (number, (name, kind, task)) in TASKS.into_iter().enumerate() {
        let mut cold = |dir| {
            stage.cold()?;
            stage.cost(|stage| task(stage, dir))
        };
        // The second directory finds the machine as the first one left it, so they take turns. A
        // task that only reads runs twice in each, the second time in the other order.
        let first = number % 2;
        let order = match kind {
            Kind::Reads => vec![first, 1 - first, 1 - first, first],
            Kind::Writes => vec![first, 1 - first],
        };
        let mut costs = [Vec::new(), Vec::new()];
        for which in order {
            costs[which].push(cold(&dirs[which])?);
        }
        let costs = costs.map(|costs| Cost::mean(&costs));
        tell(run, name, kind, &costs);
    }
    Ok(())
}

/// Tells the costs of a task in the plain and in the cloned directory, and the second ones over the
/// first.
fn tell(run: &mut Run<'_, '_>, name: &str, kind: Kind, costs: &[Cost; 2]) {
    run.found
        .seconds(&format!("{name}, plain"), &costs[0], Targets::default());
    let limit = kind.limit();
    let limits = Targets {
        raw: Some(limit),
        gp3: Some(limit),
        hdd: Some(limit),
        ..Targets::default()
    };
    run.found.ratio(
        &format!("{name}, cloned over plain"),
        &costs[1],
        &costs[0],
        limits,
    );
    let requests = costs
        .iter()
        .map(|cost| (cost.requests.reads + cost.requests.writes) as f64);
    if let [plain, cloned] = requests.collect::<Vec<_>>()[..] {
        let requests = format!("{name}, requests, plain");
        run.found.count(&requests, "requests", plain, None);
        run.found.count(
            &format!("{name}, requests, cloned over plain"),
            "x",
            cloned / plain.max(1.0),
            Some(limit),
        );
    }
}
