//! Wrong inputs of every console command: each fails with the status and the sentence that the
//! table expects, changes nothing, and leaves the virtual machine usable.

use sempa_tests::private_vm::PrivateVm;
use std::collections::BTreeSet;

/// One wrong input per line: exit status, `|`, the words after `pvm`, `|`, the texts, separated by
/// `//`, that the output contains. Single quotes keep words together. Lines that begin with `#`
/// are comments.
const TABLE: &str = include_str!("table.txt");

/// Commands that accept any words, as in PVM.
const LENIENT_COMMANDS: [&str; 5] = ["alias", "echo", "export", "setenv", "unexport"];

/// Minimum number of wrong inputs.
const INPUTS_MIN: usize = 200;

struct WrongInput<'a> {
    status: i32,
    line: &'a str,
    words: Vec<String>,
    expected_texts: Vec<&'a str>,
}

fn wrong_inputs() -> impl Iterator<Item = WrongInput<'static>> {
    let lines = TABLE
        .lines()
        .filter(|line| !line.starts_with('#') && !line.is_empty());
    lines.map(|line| {
        let mut fields = line.splitn(3, '|').map(str::trim);
        let mut field = || {
            fields
                .next()
                .unwrap_or_else(|| panic!("{line}: three fields"))
        };
        let (status, words, expected_texts) = (field(), field(), field());
        WrongInput {
            status: status
                .parse()
                .unwrap_or_else(|_| panic!("{line}: a status")),
            line,
            words: split_words(words),
            expected_texts: expected_texts.split(" // ").map(str::trim).collect(),
        }
    })
}

/// Splits words at blanks. Text between single quotes is one word.
fn split_words(text: &str) -> Vec<String> {
    let mut words = Vec::new();
    let mut word: Option<String> = None;
    let mut is_quoted = false;
    for c in text.chars() {
        match c {
            '\'' => {
                is_quoted = !is_quoted;
                word.get_or_insert_default();
            }
            ' ' if !is_quoted => words.extend(word.take()),
            c => word.get_or_insert_default().push(c),
        }
    }
    words.extend(word);
    words
}

/// Returns the command of a wrong input: its first word that is no option.
fn command_of(words: &[String]) -> Option<&str> {
    words
        .iter()
        .map(String::as_str)
        .find(|word| !word.starts_with('-'))
}

#[test]
fn table_covers_every_command() {
    let inputs: Vec<WrongInput> = wrong_inputs().collect();
    assert!(inputs.len() >= INPUTS_MIN, "{}", inputs.len());
    let distinct_words: BTreeSet<&Vec<String>> = inputs.iter().map(|input| &input.words).collect();
    assert_eq!(distinct_words.len(), inputs.len(), "no input occurs twice");
    let has_text = |input: &WrongInput| input.expected_texts.iter().all(|text| !text.is_empty());
    assert!(inputs.iter().all(has_text));
}

#[test]
#[ignore = "system tier: needs installed programs"]
fn wrong_inputs_fail_with_their_sentence() {
    let vm = PrivateVm::start(None);
    let mut faults = Vec::new();
    for input in wrong_inputs() {
        let words: Vec<&str> = input.words.iter().map(String::as_str).collect();
        let result = vm.run_console(&words);
        let output = format!("{}{}", result.stderr, result.stdout);
        let is_as_expected = result.status.code() == Some(input.status)
            && input
                .expected_texts
                .iter()
                .all(|text| output.contains(text));
        if !is_as_expected {
            faults.push(format!("{}\n   {result:?}", input.line));
        }
    }
    assert!(faults.is_empty(), "{}", faults.join("\n"));
    let hosts = vm.run_console(&["conf"]);
    assert!(
        hosts.succeeded() && hosts.stdout.starts_with("1 host, 1 data format\n"),
        "{hosts:?}"
    );
    let help = vm.run_console(&["help"]).stdout;
    let tested: BTreeSet<String> = wrong_inputs()
        .filter_map(|input| command_of(&input.words).map(String::from))
        .collect();
    let listed = help.lines().filter_map(|line| line.strip_prefix("  "));
    for name in listed.filter_map(|line| line.split_whitespace().next()) {
        assert!(
            name == "or" || LENIENT_COMMANDS.contains(&name) || tested.contains(name),
            "the table has no wrong input of {name}"
        );
    }
}

/// Each command explains itself on request, without a virtual machine.
#[test]
#[ignore = "system tier: needs installed programs"]
fn every_command_explains_itself() {
    let vm = PrivateVm::new(None);
    let help = vm.run_console(&["help"]).stdout;
    let listed = help.lines().filter_map(|line| line.strip_prefix("  "));
    let names: Vec<&str> = listed
        .filter_map(|line| line.split_whitespace().next())
        .filter(|name| *name != "or")
        .collect();
    assert!(names.len() > 35, "{help}");
    for name in names {
        for option in ["--help", "-h"] {
            let result = vm.run_console(&[name, option]);
            assert!(
                result.succeeded()
                    && result.stderr.is_empty()
                    && result.stdout.starts_with(name)
                    && result.stdout.contains("\nSyntax:  "),
                "{name} {option}: {result:?}"
            );
        }
    }
}
