//! The directive about guests that the daemon of this host enforces.

use sempa_proto::owner::GuestDirective;
use std::fmt::Display;

/// Sends directives to the daemon, and knows whether the last one is in force.
#[derive(Debug, Default)]
pub(crate) struct DirectiveSender {
    /// The directive that the daemon has accepted last; `None` if it has accepted none, or has
    /// refused a later one.
    accepted: Option<GuestDirective>,
    /// The reason why the daemon has refused the last directive; `None` if it is in force.
    refusal: Option<String>,
}

impl DirectiveSender {
    /// Calls `send` with the directive unless the same one is in force. A refused directive is sent
    /// again by the next call, because the reason may have gone. Logs the first of several
    /// refusals.
    pub(crate) fn send_if_new<E: Display>(
        &mut self,
        directive: GuestDirective,
        send: impl FnOnce(GuestDirective) -> Result<(), E>,
    ) {
        if self.accepted.as_ref() == Some(&directive) {
            return;
        }
        match send(directive.clone()) {
            Ok(()) => {
                self.refusal = None;
                self.accepted = Some(directive);
            }
            Err(error) => {
                self.accepted = None;
                let refusal = format!(
                    "{error}; guests are stopped only when the resource manager migrates them"
                );
                if self.refusal.is_none() {
                    tracing::warn!("{refusal}");
                }
                self.refusal = Some(refusal);
            }
        }
    }

    /// Returns the reason why the last directive is not in force; `None` if it is.
    pub(crate) fn refusal(&self) -> Option<&str> {
        self.refusal.as_deref()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use sempa_proto::owner::{GuestAccess, GuestLimits};

    fn directive(reason: &str) -> GuestDirective {
        GuestDirective {
            access: GuestAccess::Welcome,
            reason: reason.into(),
            limits: GuestLimits::default(),
        }
    }

    /// A directive that the daemon has refused is not in force: it is sent again, and the reason is
    /// known until the daemon has accepted one.
    #[test]
    fn refused_directive_is_sent_again() {
        let mut sender = DirectiveSender::default();
        let mut sent_count = 0;
        let mut send = |reason: &str, result: Result<(), &str>| {
            sender.send_if_new(directive(reason), |_| {
                sent_count += 1;
                result
            });
            (sent_count, sender.refusal().map(str::to_string))
        };
        let (count, refusal) = send("a", Err("not a load watcher"));
        assert_eq!(count, 1);
        let refusal = refusal.expect("the daemon has refused it");
        assert!(refusal.starts_with("not a load watcher; "), "{refusal}");
        assert_eq!(send("a", Err("not a load watcher")), (2, Some(refusal)));
        assert_eq!(send("a", Ok(())), (3, None));
        assert_eq!(send("a", Err("it is in force")), (3, None));
        assert!(send("b", Err("refused")).1.is_some());
        // The directive before the refused one is not known to be in force.
        assert_eq!(send("a", Ok(())), (5, None));
    }
}
