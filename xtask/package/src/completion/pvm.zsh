#compdef pvm
# Completion of Sempa's console for zsh. Made from the console's table of commands.

_pvm() {
  local -a commands candidates
  commands=(
@COMMANDS@
  )
  local first=2
  while [[ ${words[first]} == (--json|-d*|-n*) && first -lt CURRENT ]]; do
    (( first++ ))
  done
  if (( CURRENT == first )); then
    if [[ ${words[CURRENT]} == -* ]]; then
      compadd -- --json --help --version
    else
      _describe 'command' commands
    fi
    return
  fi
  candidates=(${(f)"$(pvm --complete "${(j: :)words[first,CURRENT]}" 2>/dev/null)"})
  local -a folders
  folders=(${(M)candidates:#*/})
  candidates=(${candidates:#*/})
  compadd -Q -- $candidates
  compadd -Q -S '' -- $folders
}

_pvm "$@"
