# Completion of Sempa's console for bash. Made from the console's table of commands.

_pvm() {
	local line=${COMP_LINE:0:COMP_POINT} cur=${COMP_WORDS[COMP_CWORD]} word first prefix
	COMPREPLY=()
	# The words that the console would read: without the program's name and its own options.
	line=${line#*[[:space:]]}
	while [[ $line =~ ^[[:space:]]*(--json|-d[^[:space:]]*|-n[^[:space:]]*)[[:space:]]+(.*)$ ]]; do
		line=${BASH_REMATCH[2]}
	done
	word=${line##*[[:space:]]}
	first=${line%"$word"}
	if [[ -z ${first//[[:space:]]/} ]]; then
		if [[ $word == -* ]]; then
			COMPREPLY=($(compgen -W '--json --help --version' -- "$word"))
		else
			COMPREPLY=($(compgen -W '@COMMANDS@' -- "$word"))
		fi
		return
	fi
	# bash takes some characters for ends of words. What it has of the word already is left out.
	prefix=${word%"$cur"}
	local candidate
	while IFS= read -r candidate; do
		COMPREPLY+=("${candidate#"$prefix"}")
	done < <(pvm --complete "$line" 2>/dev/null)
	if [[ ${#COMPREPLY[@]} -eq 1 && ${COMPREPLY[0]} == */ ]]; then
		compopt -o nospace 2>/dev/null
	fi
}
complete -F _pvm pvm
