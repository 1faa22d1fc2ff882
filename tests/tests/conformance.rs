//! The sentences of `tests/conformance`, on PVM 3.4.6 and on ours.

use sempa_tests::conformance::{System, differences, judge, outcomes};
use sempa_tests::needs;

/// The least number of sentences that the suite has.
const SENTENCES_AT_LEAST: usize = 300;

fn all_sentences_hold_on(system: System) {
    needs::require(needs::lacks());
    let outcomes = outcomes(system, &[]).expect("the programs compile and the system starts");
    let verdict = judge(
        &[(system, outcomes)],
        &differences().expect("every difference is explained"),
        true,
    );
    assert!(verdict.unexplained.is_empty(), "{}", verdict.text());
    assert!(
        verdict.sentences.len() >= SENTENCES_AT_LEAST,
        "only {} sentences",
        verdict.sentences.len()
    );
}

#[test]
#[ignore = "system tier: needs root, hosts and Debian's PVM"]
fn sentences_hold_on_real_pvm_but_for_its_known_defects() {
    all_sentences_hold_on(System::Pvm3);
}

#[test]
#[ignore = "system tier: needs root and hosts"]
fn sentences_hold_for_programs_compiled_with_our_header() {
    all_sentences_hold_on(System::Sempa);
}

#[test]
#[ignore = "system tier: needs root, hosts and Debian's PVM"]
fn sentences_hold_for_programs_compiled_for_debians_library() {
    all_sentences_hold_on(System::SempaUnchanged);
}

#[test]
fn every_known_difference_is_in_the_page_for_users() {
    differences().expect("each line has three parts, and its words are in docs/COMPATIBILITY.md");
}
