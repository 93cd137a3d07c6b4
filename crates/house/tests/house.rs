//! The sources keep to the floors of `floors.txt`, and the docs tell them.

use ramet_house::docs::documents;
use ramet_house::files::{crates, workspace};
use ramet_house::floors::{Plan, crates_upward, judge, table};
use ramet_house::{sizes, words};

/// Most lines of a function.
const LINES_MAX: usize = 70;
/// Most methods of a type. One with more holds a second idea.
const METHODS_MAX: usize = 30;

#[test]
fn no_file_lies_in_a_circle_or_imports_from_above() {
    let plan = Plan::of_workspace();
    let mut wrong = String::new();
    for (name, floors) in &plan.crates {
        let verdict = judge(name, floors);
        let details = verdict.details();
        if !details.is_empty() {
            wrong += &format!("{name}:\n{details}");
        }
    }
    assert_eq!(wrong, "");
}

#[test]
fn each_crate_has_its_place_and_depends_on_lower_ones_only() {
    let plan = Plan::of_workspace();
    let mut named: Vec<_> = plan.crates.iter().map(|(name, _)| name.clone()).collect();
    named.sort();
    assert_eq!(named, crates());
    assert_eq!(crates_upward(&plan), Vec::<String>::new());
}

#[test]
fn architecture_tells_the_floors() {
    let text = std::fs::read_to_string(workspace().join("docs/architecture.md")).unwrap();
    let table = table(&Plan::of_workspace());
    assert!(
        text.contains(&table),
        "docs/architecture.md lacks what `cargo run -p ramet-house -- table` prints:\n{table}"
    );
}

#[test]
fn comments_have_nouns_for_subjects() {
    for name in crates() {
        assert_eq!(words::of_crate(&name), Vec::<String>::new());
    }
}

#[test]
fn no_function_is_longer_than_a_screen() {
    for name in crates() {
        let (long, _) = sizes::of_crate(&name, LINES_MAX);
        let long: Vec<_> = long.into_iter().map(|f| (f.lines, f.place)).collect();
        assert_eq!(long, []);
    }
}

#[test]
fn no_type_has_more_methods_than_one_idea_needs() {
    for name in crates() {
        let (_, methods) = sizes::of_crate(&name, LINES_MAX);
        let many = methods
            .into_iter()
            .filter(|(_, count)| *count > METHODS_MAX);
        assert_eq!(many.collect::<Vec<_>>(), []);
    }
}

#[test]
fn documents_have_nouns_for_subjects_and_lines_that_fit() {
    for document in documents() {
        assert_eq!(document.open_subjects(), Vec::<String>::new());
        assert_eq!(document.long_lines(), Vec::<String>::new());
    }
}

#[test]
fn documents_name_files_that_exist() {
    for document in documents() {
        assert_eq!(document.lost_files(), Vec::<String>::new());
    }
}

#[test]
fn ways_down_visit_each_file_once() {
    for document in documents() {
        assert_eq!(document.visited_twice(), Vec::<String>::new());
    }
}

#[test]
fn glossary_is_in_alphabetical_order_and_defines_each_term_once() {
    let mut documents = documents().into_iter();
    let glossary = documents.find(|document| document.path.ends_with("glossary.md"));
    let terms = glossary.expect("there is a glossary").terms();
    assert!(terms.len() > 100, "{terms:?}");
    for pair in terms.windows(2) {
        assert!(pair[0] < pair[1], "{pair:?}");
    }
}
