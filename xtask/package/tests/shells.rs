//! The completion files in real shells.

use sempa_tests::requirements::installed_prefix;
use std::path::Path;
use std::process::Command;

/// Writes the completion files for the installed console to a folder.
fn write_files(share: &Path) {
    let prefix = installed_prefix().unwrap_or_else(|error| panic!("cannot run here: {error:#}"));
    xtask_package::completion::write_files(&prefix.join("bin/pvm"), share).expect("files");
}

/// Returns the completions that bash offers for a command line, whose last word is unfinished.
fn complete_in_bash(share: &Path, line: &str) -> Vec<String> {
    let prefix = installed_prefix().expect("an installation");
    let words: Vec<String> = line.split(' ').map(|word| format!("'{word}'")).collect();
    let script = format!(
        "PATH={}/bin:$PATH; . {}/bash-completion/completions/pvm; COMP_LINE='{line}'; \
         COMP_POINT=${{#COMP_LINE}}; COMP_WORDS=({}); COMP_CWORD={}; _pvm; printf '%s\\n' \"${{COMPREPLY[@]}}\"",
        prefix.display(),
        share.display(),
        words.join(" "),
        words.len() - 1
    );
    let output = Command::new("bash")
        .args(["-c", &script])
        .output()
        .expect("bash is installed");
    let errors = String::from_utf8_lossy(&output.stderr).into_owned();
    assert!(output.status.success() && errors.is_empty(), "{errors}");
    String::from_utf8_lossy(&output.stdout)
        .lines()
        .filter(|line| !line.is_empty())
        .map(str::to_string)
        .collect()
}

#[test]
#[ignore = "system tier: needs installed programs and bash"]
fn bash_completes_commands_and_their_words() {
    let share = tempfile::tempdir().expect("a folder");
    write_files(share.path());
    let complete = |line: &str| complete_in_bash(share.path(), line);
    assert_eq!(complete("pvm mig"), ["migrate"]);
    assert_eq!(
        complete("pvm --json checkpoin"),
        ["checkpoint", "checkpoints"]
    );
    assert_eq!(complete("pvm --js"), ["--json"]);
    assert_eq!(complete("pvm help mst"), ["mstat"]);
    assert_eq!(complete("pvm sig KI"), ["KILL"]);
    assert_eq!(
        complete("pvm -nhere spawn /etc/os-rel"),
        ["/etc/os-release"]
    );
    assert!(complete("pvm ").len() > 30);
}

/// Shells that are not installed cannot read their files; those that are must not find an error.
#[test]
#[ignore = "system tier: needs installed programs and bash"]
fn installed_shells_accept_their_files() {
    let share = tempfile::tempdir().expect("a folder");
    write_files(share.path());
    let files = [
        ("bash", "bash-completion/completions/pvm"),
        ("zsh", "zsh/vendor-completions/_pvm"),
        ("fish", "fish/vendor_completions.d/pvm.fish"),
    ];
    let mut checked_count = 0;
    for (shell, file) in files {
        let check = Command::new(shell)
            .arg("-n")
            .arg(share.path().join(file))
            .output();
        match check {
            Ok(output) => {
                let errors = String::from_utf8_lossy(&output.stderr);
                assert!(output.status.success(), "{shell}: {errors}");
                checked_count += 1;
            }
            Err(error) => assert_eq!(error.kind(), std::io::ErrorKind::NotFound, "{shell}"),
        }
    }
    assert!(checked_count > 0);
}
