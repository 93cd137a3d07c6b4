//! Prints the state of the sources: `cargo run -p ramet-house -- deps | table | sizes | words [CRATE ...]`, or `docs`.
#![forbid(unsafe_code)]

use ramet_house::files::crates;
use ramet_house::floors::{Plan, crates_upward, judge, table};
use ramet_house::{docs, sizes, words};

fn main() {
    let mut arguments = std::env::args().skip(1);
    let command = arguments.next().unwrap_or_default();
    let chosen: Vec<_> = arguments.collect();
    let is_chosen = |name: &str| chosen.is_empty() || chosen.iter().any(|c| c == name);
    match command.as_str() {
        "deps" => deps(is_chosen),
        "table" => print!("{}", table(&Plan::of_workspace())),
        "sizes" => {
            for name in crates().iter().filter(|name| is_chosen(name)) {
                let (long, methods) = sizes::of_crate(name, 70);
                println!("{name}: {} functions over 70 lines", long.len());
                for found in long {
                    println!("  {:4} {}", found.lines, found.place);
                }
                let mut methods: Vec<_> = methods.into_iter().collect();
                methods.sort_by_key(|(_, count)| std::cmp::Reverse(*count));
                for (owner, count) in methods.iter().take(5) {
                    println!("  {count:4} methods: {owner}");
                }
            }
        }
        "words" => {
            for name in crates().iter().filter(|name| is_chosen(name)) {
                let found = words::of_crate(name);
                if !chosen.is_empty() {
                    found.iter().for_each(|line| println!("{line}"));
                }
                println!("{name}: {} lines with an open subject", found.len());
            }
        }
        "docs" => {
            for document in docs::documents() {
                let mistakes = [
                    ("subject", document.open_subjects()),
                    ("long", document.long_lines()),
                    ("lost", document.lost_files()),
                    ("twice", document.visited_twice()),
                ];
                for (kind, lines) in mistakes {
                    lines.iter().for_each(|line| println!("{kind}: {line}"));
                }
            }
        }
        _ => eprintln!("deps, table, sizes or words, and crates; or docs"),
    }
}

fn deps(is_chosen: impl Fn(&str) -> bool) {
    let plan = Plan::of_workspace();
    let (mut circles, mut upward) = (0, 0);
    for (name, floors) in plan.crates.iter().filter(|(name, _)| is_chosen(name)) {
        let verdict = judge(name, floors);
        println!(
            "{name}: {} files, {} arrows, {} files in circles, {} arrows upward",
            verdict.files,
            verdict.arrows,
            verdict.in_circles(),
            verdict.upward.len()
        );
        print!("{}", verdict.details());
        circles += verdict.in_circles();
        upward += verdict.upward.len();
    }
    let crates = crates_upward(&plan);
    crates.iter().for_each(|arrow| println!("crates: {arrow}"));
    println!(
        "{circles} files in circles, {} arrows upward",
        upward + crates.len()
    );
}
