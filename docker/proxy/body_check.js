// Refuses what Triton's JSON reader may not survive: it calls itself for every list or object inside another.
// Strings are skipped: what they hold is read by the models, which have limits of their own.
const MOST_OPENED = 256;
const QUOTE = 0x22, BACKSLASH = 0x5c, LIST = 0x5b, OBJECT = 0x7b;

function check(request) {
    const body = request.requestBuffer;
    if (body !== undefined && opened(body) > MOST_OPENED) {
        request.headersOut['Content-Type'] = 'application/json';
        request.return(400, JSON.stringify({
            error: `body: given more than ${MOST_OPENED} lists and objects, allowed: at most ${MOST_OPENED}`,
        }));
        return;
    }
    request.internalRedirect('@triton');
}

// How many lists and objects a body begins outside its strings; counting ends beyond MOST_OPENED.
function opened(body) {
    let count = 0;
    for (let i = 0; i < body.length && count <= MOST_OPENED; i++) {
        const byte = body[i];
        if (byte === QUOTE) {
            i = endOfString(body, i);
        } else if (byte === LIST || byte === OBJECT) {
            count++;
        }
    }
    return count;
}

// Where the quote is that ends the string which begins at `start`: the next without an odd number of backslashes.
function endOfString(body, start) {
    let end = start;
    for (;;) {
        end = body.indexOf(QUOTE, end + 1);
        if (end < 0) {
            return body.length;
        }
        let backslashes = 0;
        while (body[end - 1 - backslashes] === BACKSLASH) {
            backslashes++;
        }
        if (backslashes % 2 === 0) {
            return end;
        }
    }
}

export default { check };
