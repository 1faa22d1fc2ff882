//! Whether the job of a checkpoint may still run in the virtual machine that made the checkpoint,
//! if the store has no claim of the job. A copy on another host has no claim.

use crate::shell::env::env_var;
use crate::shell::vm_query::{QueryResult, ask_hosts};
use sempa_notes::{NoteFolder, VmNote};
use sempa_proto::Micros;
use sempa_proto::checkpoint::RestartFailure;
use tokio::runtime::Handle;

/// State of the virtual machine that made a checkpoint, as far as known.
#[derive(Clone, Debug, PartialEq, Eq)]
enum OriginState {
    /// There is no note about it, so its hosts are not known.
    Unknown,
    /// Its hosts were asked.
    Asked { vm: String, result: QueryResult },
}

/// Checks that a checkpoint without a claim may be restarted: the virtual machine that was created
/// at `vm_created_at` is gone as far as can be known, and the user insists. Blocks; must be called
/// on a blocking thread of the runtime.
///
/// # Errors
/// A daemon of that virtual machine answers, or none does and the user does not insist.
pub(super) fn check_origin(vm_created_at: Micros, is_forced: bool) -> Result<(), RestartFailure> {
    let note = find_note(vm_created_at);
    let state = match note {
        None => OriginState::Unknown,
        Some(note) => OriginState::Asked {
            result: Handle::current().block_on(ask_hosts(&note)),
            vm: note.vm,
        },
    };
    decide(state, is_forced)
}

/// Returns a note about the virtual machine that was created at this time, of any machine that
/// shares the directory. The newest one knows most hosts.
fn find_note(vm_created_at: Micros) -> Option<VmNote> {
    let notes = NoteFolder::from_env(env_var)?.read_all();
    let notes = notes.into_iter().map(|stored| stored.note);
    notes
        .filter(|note| note.summary.created_at == vm_created_at)
        .max_by_key(|note| note.summary.made_at)
}

fn decide(state: OriginState, is_forced: bool) -> Result<(), RestartFailure> {
    match state {
        OriginState::Asked {
            vm,
            result: QueryResult::Answered { host, address },
        } => Err(RestartFailure::VmAnswers { vm, host, address }),
        _ if is_forced => Ok(()),
        OriginState::Unknown => Err(RestartFailure::MayRunElsewhere { silent_hosts: None }),
        OriginState::Asked {
            result: QueryResult::Silent { hosts },
            ..
        } => Err(RestartFailure::MayRunElsewhere {
            silent_hosts: Some(hosts),
        }),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// What cannot be known needs the user's word. What is known to run is never restarted.
    #[test]
    fn unknown_origin_needs_force_and_living_one_refuses() {
        let asked = |result| OriginState::Asked {
            vm: "pvm".into(),
            result,
        };
        let silent = asked(QueryResult::Silent {
            hosts: vec!["h1".into(), "h2".into()],
        });
        let answered = asked(QueryResult::Answered {
            host: "h1".into(),
            address: ([127, 0, 0, 1], 4).into(),
        });
        let texts = |state: OriginState| {
            [false, true].map(|is_forced| {
                decide(state.clone(), is_forced)
                    .err()
                    .map(|failure| failure.to_string())
            })
        };
        let [unforced, forced] = texts(silent);
        let text = unforced.expect("refused");
        assert!(
            text.contains("Its hosts were asked (h1, h2) and do not answer")
                && text.contains("it would run twice")
                && text.ends_with("use --force"),
            "{text}"
        );
        assert_eq!(forced, None);
        let [unforced, forced] = texts(OriginState::Unknown);
        let text = unforced.expect("refused");
        assert!(text.contains("nobody could be asked"), "{text}");
        assert_eq!(forced, None);
        for text in texts(answered) {
            let text = text.expect("refused");
            assert!(
                text.contains("its daemon on h1 answers at 127.0.0.1:4")
                    && text.ends_with("(on h1: pvm halt)"),
                "{text}"
            );
        }
    }
}
